"""Every mutant of a source file: one small change each, made by mutmut's operators.

mutmut itself only changes the bodies of functions without decorators, because it puts each mutant behind a
trampoline. Of our files that would skip the table of objectives, `Head.logits` and the backward pass of the
log-probs. Its operators are applied here to the complete file. What never runs is not changed: annotations,
type aliases, imports, decorators. Neither are calls of `len` and `isinstance` (as in mutmut), nor the words
of messages and docstrings. Of strings only those of one word are changed, because these name options, streams
and needs.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators


@dataclass(frozen=True)
class Mutant:
    """One changed node of a file."""

    path: Path
    line: int
    text: str  # of that line
    function: (
        str | None
    )  # qualified name of the outermost function whose body it is in; None: it runs at import
    module: cst.Module
    old: cst.CSTNode
    new: cst.CSTNode

    @property
    def name(self) -> str:
        """What it changes, without the line's number: function, text of the line, node before and after."""
        before, after = (cst.Module([]).code_for_node(node) for node in (self.old, self.new))
        return "\n".join([str(self.function), self.text, before, after])

    def source(self) -> str:
        changed = self.module.deep_replace(self.old, self.new)
        assert isinstance(changed, cst.Module)
        return changed.code

    def diff(self) -> str:
        """Lines that go, with -, and lines that come, with +."""
        lines = difflib.unified_diff(
            self.module.code.splitlines(), self.source().splitlines(), n=0, lineterm=""
        )
        return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))


def mutants(path: Path) -> list[Mutant]:
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()), unsafe_skip_copy=True)
    visitor = _Visitor(path, wrapper.module)
    wrapper.visit(visitor)
    return visitor.found


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: Path, module: cst.Module) -> None:
        super().__init__()
        self.path, self.module = path, module
        self.lines = module.code.splitlines()
        self.names: list[str] = []  # of the classes and functions around
        self.bodies: list[str] = []  # qualified names of the functions in whose bodies we are
        self.found: list[Mutant] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _left_alone(node):
            return False
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self.names.append(node.name.value)
        if isinstance(node, cst.FunctionDef):
            # Defaults belong to what is around the function: they run where it is defined.
            node.params.visit(self)
            self.bodies.append(".".join(self.names))
            node.body.visit(self)
            self.bodies.pop()
            self.names.pop()
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                changes = list(operator(node))
                if isinstance(node, cst.SimpleString):
                    changes = changes[:1]  # the others only change capitals
                for new in changes:
                    self._add(node, new)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.ClassDef):
            self.names.pop()

    def _add(self, old: cst.CSTNode, new: cst.CSTNode) -> None:
        line = self.get_metadata(PositionProvider, old).start.line
        function = self.bodies[0] if self.bodies else None
        self.found.append(Mutant(self.path, line, self.lines[line - 1], function, self.module, old, new))


def _left_alone(node: cst.CSTNode) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom():
            return True
        case cst.SimpleString():
            return not node.raw_value.isidentifier()
        case cst.Expr(value=cst.SimpleString()):
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value="__all__"))]):
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=cst.Subscript()):
            return name.istitle()  # a type alias
        case cst.Call(func=cst.Name(value="len" | "isinstance")):
            return True
    return False
