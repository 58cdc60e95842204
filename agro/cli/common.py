"""Shared parts of commands: exit codes, common options, parsing of KEY=VALUE, lists for a terminal."""

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
TURNS, LONGEST = 8, 256  # default limits: turns per episode, tokens per response

# Options of several commands, by the name of a parameter without a Typer annotation. The Args of a command
# may replace the help.
SHARED = {
    "as_json": typer.Option("--json", help="Print one JSON document on stdout, and nothing else."),
    "environment": typer.Option(
        "--environment", help="Environment of the episodes: verifiers:ENV_ID, module:Class or file.py:Class."
    ),
    "host": typer.Option("--host", help="Address to listen on; 0.0.0.0: all."),
    "keep_days": typer.Option(
        "--keep-days", min=1, help="Delete answers older than N days, at start and daily."
    ),
    "keep_secrets": typer.Option(
        "--keep-secrets", help="Store keys and e-mail addresses, which are redacted by default."
    ),
    "max_new": typer.Option("--max-new", min=1, help=f"Most tokens per response; the run's, or {LONGEST}."),
    "max_turns": typer.Option(
        "--max-turns", min=1, metavar="N", help=f"Most turns per episode. Default: {TURNS}."
    ),
    "n": typer.Option("-n", "--responses", min=1, help="Responses per prompt."),
    "option": typer.Option(
        "--option", help="KEY=VALUE of the reward, such as marker='####'; may be repeated."
    ),
    "policy": typer.Option(
        "--policy", help="KEY=VALUE of [policy], such as chat.wrap=true; may be repeated."
    ),
    "port": typer.Option("--port", min=0, help="Port to listen on; 0: any free one."),
    "redact_pattern": typer.Option(
        "--redact-pattern", help="Redact matches of this regular expression; may be repeated."
    ),
    "reward": typer.Option("--reward", help="exact, regex, math, module:function or file.py:function."),
    "seed": typer.Option("--seed", min=0, help="Random seed."),
    "store": typer.Option("--store", help="Store every answered call here, before its end is sent."),
    "temperature": typer.Option("--temperature", min=0.0, help="Sampling temperature."),
    "timeout": typer.Option("--timeout", min=0.1, help="Time limit of an answer, in seconds."),
    "workers": typer.Option(
        "--workers", min=1, metavar="N", help="Processes that read records; this one stores them."
    ),
}


class Command(TyperCommand):
    """A command whose help shows no type for a flag."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a repeated single-value option, whose earlier values would be lost silently."""
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for param, times in Counter(order).items():
                takes_one = not (param.multiple or getattr(param, "is_flag", False) or param.nargs != 1)
                if times > 1 and takes_one:
                    ctx.fail(f"{param.opts[0]} is set {times} times; it takes one value")
        return super().parse_args(ctx, args)


_NO_PATH = {  # errors of a path that is invalid or inaccessible
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EEXIST, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Exit with 2 and a message on a user's mistake, with 130 on an interrupt, without a traceback."""

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
                end(2, f"agro: {error.filename}: {error.strerror}; use another path")
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
    """Print a command's JSON document, or its text."""
    print(json.dumps(document, ensure_ascii=False, allow_nan=False) if as_json else text)


def passed_options(context: typer.Context) -> list[str]:
    """List the options and arguments that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def leave_out(context: typer.Context, reason: str, wrong: Collection[str]) -> None:
    """Refuse options that are incompatible with another one."""
    flags = [param.opts[0] for param in context.command.params if param.name in wrong]
    if flags:
        raise Refused(f"{reason}: leave out {', '.join(flags)}")


def terminal() -> Console:
    """Return a console on stdout that treats no text as markup."""
    from rich.console import Console

    from agro.io.terminal import drawn, visible

    class Visible(Console):
        def print(self, *objects: Any, **settings: Any) -> None:
            super().print(*(visible(text) if isinstance(text, str) else text for text in objects), **settings)

    return Visible(file=drawn(sys.stdout), markup=False, highlight=False, emoji=False)


def show_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, wrap_names: bool = False) -> Console:
    """Print a table, and return its console. Cells are folded, never cut; the first column, of names, only if
    `wrap_names`."""
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
    """Build [policy] from this model and these settings, and from `base` for everything else.

    A checkpoint's weights need its run's [policy], which replaces `base`.
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
            raise Refused(f"{flag}: {key} is set twice")
        parsed[key] = value
    return parsed


def options(items: list[str] | None) -> dict[str, Any]:
    """Parse KEY=VALUE, with values as for `agro.config.parse`."""
    from agro.config import check_values, parse

    raw_values = pairs(items, "--option", "KEY=VALUE")
    parsed = {key: parse(raw, f"--option {key}") for key, raw in raw_values.items()}
    check_values(parsed, "--option")
    return parsed


@contextmanager
def opened_log(path: Path) -> Iterator[Store]:
    """Open the store at `path`, or import the log there into a temporary one."""
    from agro.logs.importing import import_files
    from agro.store import Store
    from agro.store.location import is_store

    if is_store(path) or not path.exists():  # it refuses a missing path
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
                f"{error}\nWhat to do: agro import with these options, then use the store"
            ) from None
        yield store


def width() -> int:
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def paragraph(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """Wrap text, indenting all lines but the first by `hanging` more spaces."""
    lead = " " * indent
    return textwrap.wrap(
        text,
        width(),
        initial_indent=lead,
        subsequent_indent=lead + " " * hanging,
        break_on_hyphens=False,
    )


def names(title: str, listed: Iterable[str]) -> list[str]:
    """Return a title, and names side by side."""
    return [title, *paragraph("  ".join(name.replace(" ", "\u00a0") for name in listed), 2)]
