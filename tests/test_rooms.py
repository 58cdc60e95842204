"""The order of the rooms (modules and packages of `agro`) in docs/architecture.md, and no cycle of modules.

Every import counts: those inside functions and those under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from architecture import ROOMS, SATELLITES, page

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "agro").rglob("*.py"))
BESIDE = sorted(path.parent for path in ROOT.glob("agro_*/__init__.py"))  # packages that entry points name


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


def imported(source: str, known: set[str]) -> set[str]:
    """The modules of `known` that a source imports.

    A name that is no module counts for the module that it comes from.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports aren't used here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in known else str(node.module))
    return names & known


@cache
def imports() -> dict[str, set[str]]:
    """Of each module those that it imports."""
    return {name: imported(path.read_text(), set(MODULES)) for name, path in MODULES.items()}


def room_of(name: str) -> str:
    return name.split(".")[1]


def test_every_room_is_listed() -> None:
    rooms = {room_of(name) for name in MODULES if "." in name} - {"__main__"}
    assert rooms == {*ROOMS, *SATELLITES}
    entries = {path.name for path in (ROOT / "agro").iterdir()} - {"py.typed", "__pycache__"}
    assert len(entries) <= 22


def test_a_room_imports_only_rooms_before_it() -> None:
    place = {room: i for i, room in enumerate((*ROOMS, *SATELLITES))}
    wrong = []
    for name, others in imports().items():
        for other in others:
            inner = "." in name and "." in other and "__main__" not in name
            if inner and place[room_of(name)] < place[room_of(other)]:
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_the_map_is_that_of_the_rooms() -> None:
    made = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert made == page(), "run: python tools/docs/architecture.py > docs/architecture.md"
    for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", made):
        assert any((ROOT / folder / path).exists() for folder in ("agro", ".")), path


def test_the_core_names_no_package_beside_it() -> None:
    """Only entry points in pyproject.toml name them, as they name what users install."""
    assert {"agro_formats", "agro_grade", "agro_papers"} <= {path.name for path in BESIDE}
    beside = re.compile("|".join(rf"\b{path.name}\b" for path in BESIDE))
    texts = [path for path in (ROOT / "agro").rglob("*") if path.suffix in (".py", ".toml", ".md", ".jinja")]
    assert [path.name for path in texts if beside.search(path.read_text(encoding="utf-8"))] == []


def test_graders_need_nothing_of_agro() -> None:
    """`agro_grade.rewards` makes rewards of them, from public names."""
    public = {"agro.config", "agro.errors", "agro.rewards", "agro.types"}
    known = {*MODULES, *(f"agro_grade.{path.stem}" for path in (ROOT / "agro_grade").glob("*.py"))}
    for path in (ROOT / "agro_grade").glob("*.py"):
        found = {name for name in imported(path.read_text(), known) if not name.startswith("agro_grade")}
        assert found == (public if path.stem == "rewards" else set()), path


def test_inside_the_package_nothing_imports_the_package_itself() -> None:
    assert [name for name, others in imports().items() if "agro" in others] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()


def documented() -> dict[str, set[str] | None]:
    """The modules that docs/api documents, each with the names that it has of it; None: all."""
    found: dict[str, set[str] | None] = {}
    for page_of_api in (ROOT / "docs/api").glob("*.md"):
        for part in re.split(r"^::: ", page_of_api.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            members = re.search(r"members: \[(.*)\]", part)
            found[part.split()[0]] = set(members[1].split(", ")) if members else None
    return found


def test_papers_import_what_is_documented() -> None:
    """So a source or an objective of a user's can do what they do."""
    public, hidden = documented(), []
    for path in (ROOT / "agro_papers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Import) or not any(a.name.startswith("agro") for a in node.names)
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "agro":
                module = str(node.module)
                for name in (alias.name for alias in node.names):
                    names = public.get(module, set())
                    if names is not None and name not in names and f"{module}.{name}" not in public:
                        hidden.append(f"{path.name}: {module}.{name}")
    assert hidden == []


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import agro.store", {"agro.store"}),
        ("from agro.store import Store", {"agro.store"}),
        ("from agro.store import survey", {"agro.store.survey"}),
        ("def f():\n    from agro.store import Store", {"agro.store"}),
        ("if TYPE_CHECKING:\n    from agro.store.survey import Group", {"agro.store.survey"}),
        ("import torch", set()),
    ],
)
def test_imports_are_seen(source: str, modules: set[str]) -> None:
    assert imported(source, {"agro.store", "agro.store.survey"}) == modules
