"""What commands share: exit codes, common options, parsing of KEY=VALUE, lists for a terminal."""

from __future__ import annotations

import errno
import functools
import json
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import typer
from typer.core import TyperCommand

from agro.errors import Interrupted, Refused

if TYPE_CHECKING:
    from rich.console import Console

    from agro import config
    from agro.store import Store

P = ParamSpec("P")
TURNS, LONGEST = 8, 256  # of an episode, and tokens of a response, where nothing else is said

# Options that several commands have, by the names of parameters without an annotation of typer's. The Args of
# a command may have another help.
SHARED = {
    "as_json": typer.Option("--json", help="One JSON document on stdout, nothing else."),
    "environment": typer.Option(
        "--environment", help="Episodes: verifiers:ENV_ID, module:Class or file.py:Class."
    ),
    "host": typer.Option("--host", help="The address to listen at; 0.0.0.0: all."),
    "keep_days": typer.Option(
        "--keep-days", min=1, help="Delete what was answered more days ago, at start and daily."
    ),
    "keep_secrets": typer.Option(
        "--keep-secrets", help="Store keys and e-mail addresses too; they are redacted else."
    ),
    "max_new": typer.Option("--max-new", min=1, help=f"Tokens a response at most; the run's, or {LONGEST}."),
    "max_turns": typer.Option(
        "--max-turns", min=1, metavar="N", help=f"Turns of an episode at most; {TURNS}."
    ),
    "n": typer.Option("-n", "--responses", min=1, help="Responses a prompt."),
    "option": typer.Option(
        "--option", help="KEY=VALUE of the reward, such as marker='####'; may be repeated."
    ),
    "policy": typer.Option(
        "--policy", help="KEY=VALUE of [policy], such as chat.wrap=true; may be repeated."
    ),
    "port": typer.Option("--port", min=0, help="0: a free one."),
    "redact_pattern": typer.Option(
        "--redact-pattern", help="Redact what this regular expression matches; may be repeated."
    ),
    "reward": typer.Option("--reward", help="exact, regex, math, module:function or file.py:function."),
    "seed": typer.Option("--seed", min=0, help="Of the random numbers."),
    "store": typer.Option("--store", help="Where every answered call goes, before its end is sent."),
    "temperature": typer.Option("--temperature", min=0.0, help="Of the model's distribution."),
    "timeout": typer.Option("--timeout", min=0.1, help="Seconds that an answer may take."),
    "workers": typer.Option(
        "--workers", min=1, metavar="N", help="Processes that read records, beside this one that stores them."
    ),
}


class Command(TyperCommand):
    """Shows the types of values only: a flag has none."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An option that takes one value is given once: the last one wouldn't tell of those before."""
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for param, times in Counter(order).items():
                takes_one = not (param.multiple or getattr(param, "is_flag", False) or param.nargs != 1)
                if times > 1 and takes_one:
                    ctx.fail(f"{param.opts[0]} is given {times} times; it takes one value")
        return super().parse_args(ctx, args)


_NO_PATH = {  # what is given for a path can't be one, or nothing can be there
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EEXIST, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Exit with 2 and a message for a user's mistake, and with 130 when interrupted; without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from agro.io.terminal import shown_safely

        with shown_safely():
            try:
                command(*args, **kwargs)
            except Refused as error:
                end(2, f"agro: {error}")
            except OSError as error:
                if error.filename is None or error.errno not in _NO_PATH:
                    raise
                end(2, f"agro: {error.filename}: {error.strerror}; give another path")
            except KeyboardInterrupt:
                end(130, "agro: interrupted")
            except Interrupted:
                end(130, "")

    return run


def end(code: int, message: str) -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(code)


def answer(document: Any, text: str, as_json: bool) -> None:
    """The one JSON document of a command, or its text."""
    print(json.dumps(document, ensure_ascii=False, allow_nan=False) if as_json else text)


def given(context: typer.Context) -> list[str]:
    """The options and arguments that the command line has."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def leave_out(context: typer.Context, reason: str, wrong: Collection[str]) -> None:
    """Refuse options that were given and don't go with another one."""
    flags = [param.opts[0] for param in context.command.params if param.name in wrong]
    if flags:
        raise Refused(f"{reason}: leave out {', '.join(flags)}")


def terminal() -> Console:
    """stdout for texts of any origin: nothing in them is markup."""
    from rich.console import Console

    from agro.io.terminal import drawn, visible

    class Visible(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*(visible(text) if isinstance(text, str) else text for text in objects), **how)

    return Visible(file=drawn(sys.stdout), markup=False, highlight=False, emoji=False)


def show_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, wrap_names: bool = False) -> Console:
    """Print rows; the terminal for what follows. No cell is cut: cells are folded, and so is the first
    column, of names, where `wrap_names`."""
    from rich.table import Table

    from agro.io.terminal import visible

    shown = Table(show_edge=False)
    for number, title in enumerate(titles):
        shown.add_column(title, no_wrap=number == 0 and not wrap_names, overflow="fold")
    for row in rows:
        shown.add_row(*map(visible, row))
    console = terminal()
    console.print(shown)
    return console


def policy_config(
    model: str, settings: list[str] | None, base: config.PolicyConfig | None = None
) -> config.PolicyConfig:
    """[policy] with this model and these settings. What neither says is as in `base`.

    Of a checkpoint it is that of its run, which the weights are put into.
    """
    from agro.config import RunConfig, override

    policy: dict[str, Any] = {} if base is None else base.model_dump(mode="json")
    policy |= {"model": model, "new": None, "lora": None}
    folder = Path(model).absolute()
    if (folder / "position.json").is_file():
        policy = RunConfig.load(folder.parents[1] / "config.json").policy.model_dump(mode="json")
    values = {"policy": policy}
    for item in settings or []:
        override(values, f"policy.{item}", RunConfig)
    return RunConfig.of(values, "--policy").policy


def pairs(items: list[str] | None, flag: str, form: str) -> dict[str, str]:
    parsed = {}
    for item in items or []:
        key, eq, value = item.partition("=")
        if not (key and eq and value):
            raise Refused(f"{flag} {item!r}: expected {form}")
        if key in parsed:
            raise Refused(f"{flag}: {key} is given twice")
        parsed[key] = value
    return parsed


def options(items: list[str] | None) -> dict[str, Any]:
    """KEY=VALUE with a value as of `agro.config.parse`."""
    from agro.config import check_values, parse

    raw_values = pairs(items, "--option", "KEY=VALUE")
    parsed = {key: parse(raw, f"--option {key}") for key, raw in raw_values.items()}
    check_values(parsed, "--option")
    return parsed


@contextmanager
def opened_log(path: Path) -> Iterator[Store]:
    """The store at `path`, or one in a temporary folder with what the log there has."""
    from agro.logs.importing import import_files
    from agro.store import Store
    from agro.store.location import is_store

    if is_store(path) or not path.exists():  # it refuses what doesn't exist
        with Store.open(path, read_only=True) as store:
            yield store
        return
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        try:
            import_files(store, [path])
        except Refused as error:
            if "--map" not in str(error):
                raise
            raise Refused(
                f"{error}\nWhat to do: agro import with these options, then give the store"
            ) from None
        yield store


def width() -> int:
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def paragraph(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """Text in lines, all but the first with `hanging` more spaces before them."""
    lead = " " * indent
    return textwrap.wrap(
        text,
        width(),
        initial_indent=lead,
        subsequent_indent=lead + " " * hanging,
        break_on_hyphens=False,
    )


def names(title: str, listed: Iterable[str]) -> list[str]:
    """A title, and names side by side."""
    return [title, *paragraph("  ".join(name.replace(" ", "\u00a0") for name in listed), 2)]
