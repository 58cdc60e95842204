"""`agro serve` and `agro proxy`: other programs' calls of a model, answered and stored; `agro loop`."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import PolicySetting, end
from agro.cli.run_models import config_of
from agro.errors import Refused, remember_secret
from agro.logs.privacy import Privacy
from agro.store.location import located
from agro.store.shared import LocalFolder

if TYPE_CHECKING:
    from agro.door.app import Newest
    from agro.door.records import Keeping

TOKEN = "AGRO_TOKEN"
Port = Annotated[int, typer.Option("--port", min=0, help="0: a free one.")]
Host = Annotated[str, typer.Option("--host", help="The address to listen at; 0.0.0.0: all.")]
StoreOption = Annotated[
    str | None, typer.Option("--store", help="Where every answered call goes, before its end is sent.")
]
Keeps = Annotated[
    bool, typer.Option("--keep-secrets", help="Store keys and e-mail addresses too; they are redacted else.")
]
Patterns = Annotated[
    list[str] | None,
    typer.Option("--redact-pattern", help="Redact what this regular expression matches; may be repeated."),
]
Days = Annotated[
    int | None,
    typer.Option("--keep-days", min=1, help="Delete what was answered more days ago, at start and daily."),
]
Seconds = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that an answer may take.")]


def serve(
    model: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a model: a folder or hub name.")],
    store: StoreOption = None,
    port: Port = 0,
    host: Host = "127.0.0.1",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Answers decoded at once; others wait.")] = 16,
    timeout: Seconds = 600.0,
    keep_secrets: Keeps = False,
    redact_pattern: Patterns = None,
    keep_days: Days = None,
    policy: PolicySetting = None,
) -> None:
    from agro.cli.chat_command import run_of
    from agro.cli.run_models import MeasuredModel

    is_other = any(change.startswith("model=") for change in policy or ())  # than what is named
    run, newest = run_of(model), None if is_other else _newest(model)
    unknown = -1 if is_other else None
    version, opening = (unknown, nullcontext(None)) if newest is None else newest()
    with opening as folder:
        named = model if run is None else None
        subject = MeasuredModel.of(run, named if folder is None else str(folder), policy, "a model")
        from agro.api.loop import version_of
        from agro.door.app import opened
        from agro.pages.local_server import listening

        keeping = _keeping(store, redact_pattern, keep_days, secrets=keep_secrets)
        with closing(listening(host, port)) as listener:
            engine: Any = subject.without_environment().rollout().engine
            engine.version = version_of(Path(subject.path)) if version is None else version
            source = subject.name if newest is None else model
            with opened(engine, batch, keeping, source, timeout, newest) as backend:
                _run(backend, listener, host)


def _newest(model: str) -> Newest | None:
    """Of what gets new weights: a loop, and a run that publishes them (source.kind = elsewhere)."""
    folder = Path(model).absolute()
    if (folder / "loop.json").is_file():
        from agro.api.loop import LoopRecord

        def promoted() -> tuple[int, AbstractContextManager[Path]]:
            path, version = LoopRecord.read(folder).newest(folder)
            return version, nullcontext(path)

        return promoted
    if not (folder / "metrics.jsonl").is_file() or config_of(folder).source.kind != "elsewhere":
        return None
    from agro.train.publications import Publications

    record = Publications(LocalFolder(folder)).begun()
    publications = Publications.of(located(record["data"]["store"], folder), record["run"], folder)

    def published() -> tuple[int, AbstractContextManager[Path]]:
        newest = publications.newest()
        if newest is None:
            raise Refused(f"{model}: the run hasn't published weights yet; try again after its first step")
        return newest.version, publications.weights(newest)

    return published


def proxy(
    to: Annotated[str, typer.Option("--to", help="URL of the server, such as http://127.0.0.1:8000/v1.")],
    store: StoreOption = None,
    port: Port = 0,
    host: Host = "127.0.0.1",
    timeout: Seconds = 600.0,
    keep_secrets: Keeps = False,
    redact_pattern: Patterns = None,
    keep_days: Days = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Ask the server for ids and log-probs too (vLLM).")
    ] = False,
    key: Annotated[
        str, typer.Option("--key", metavar="VARIABLE", help="The variable with the server's API key.")
    ] = "OPENAI_API_KEY",
) -> None:
    from agro.door.proxy import Proxy
    from agro.pages.local_server import listening

    keeping = _keeping(store, redact_pattern, keep_days, secrets=keep_secrets)
    with (
        closing(listening(host, port)) as listener,
        closing(Proxy(to, os.environ.get(key), keeping, timeout, tokens=tokens)) as backend,
    ):
        _run(backend, listener, host)


def loop(
    store: Annotated[str, typer.Argument(metavar="STORE")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…")] = None,
    model: str | None = None,
    every: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    promote: bool = False,
    rollback: bool = False,
    out: Path | None = None,
) -> None:
    """Args:
    store: Where `agro serve` or `agro proxy` keeps calls and feedback; any store.
    overrides: Of the runs, such as reward.name, data.eval_prompts and train.steps.
    model: The model to begin with: a run, or a model.
    every: Turns without an end, each after N more samples with a reward or judged pairs; else one turn.
    promote: Serve a model that was shown to be better, also that of the last turn.
    rollback: Serve the model of before the last promotion again.
    out: The folder of the loop, which agro serve takes; STORE with .loop as its ending.
    """
    from agro.api.loop import Loop

    found = Loop(store, model, out, overrides or [], partial(print, file=sys.stderr, flush=True))
    if rollback:
        print(found.roll_back())
        return
    turn = found.promote_last() if promote else None
    if every is None and turn is None:
        turn = found.turn(promote=promote)
    if turn is not None and turn.outcome == "refused":
        end(2, f"agro: {turn}")
    if turn is not None:
        print(turn, flush=True)
    while every is not None:
        found.wait(every)
        print(found.turn(promote=promote), flush=True)


def _keeping(store: str | None, patterns: list[str] | None, days: int | None, *, secrets: bool) -> Keeping:
    from agro.door.records import Keeping

    if store is None and days is not None:
        raise Refused("--keep-days: expected --store, in which answers are kept")
    return Keeping(store, Privacy(redact=not secrets, patterns=patterns or ()), days)


def _run(backend: Any, listener: Any, host: str) -> None:
    from agro.door.app import Application
    from agro.pages.local_server import serve

    token = os.environ.get(TOKEN)
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        raise Refused(
            f"--host {host}: expected a token in {TOKEN}, since others reach this address, got none"
        )
    token = token or secrets.token_urlsafe(24)
    if ":" in token or not token.isascii():
        raise Refused(f"{TOKEN}: expected ASCII text without a colon, behind which a session may stand")
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listener.getsockname()[1]}"
    if TOKEN not in os.environ:
        print(f"{TOKEN}={token}", file=sys.stderr)
    remember_secret(token)
    print(f"OpenAI: OPENAI_BASE_URL={url}/v1, Anthropic: ANTHROPIC_BASE_URL={url}", file=sys.stderr)
    with suppress(KeyboardInterrupt):
        print(f"serving {url}", flush=True)  # connections wait in the listener until it answers
        serve(Application(backend, host, token).app, listener)
