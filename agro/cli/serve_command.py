"""`agro serve` and `agro proxy`: answer and store other programs' calls of a model; `agro loop`; and `agro
chat`: talk to the result of a run, also blind against its start."""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import end
from agro.cli.run_models import MeasuredModel, check_against, config_of
from agro.config import RunConfig, SamplerConfig
from agro.errors import Refused, remember_secret
from agro.logs.privacy import Privacy
from agro.store import Pair, Store
from agro.store.location import located
from agro.store.shared import LocalFolder
from agro.train.trainable import judged_prompts
from agro.types import Prompt

if TYPE_CHECKING:
    from agro.door.app import Newest
    from agro.door.sessions import Keeping
    from agro.rollout import Rollout


TOKEN = "AGRO_TOKEN"


def serve(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    store: str | None = None,
    port: int = 0,
    host: str = "127.0.0.1",
    batch: Annotated[int, typer.Option(min=1)] = 16,
    timeout: float = 600.0,
    keep_secrets: bool = False,
    redact_pattern: list[str] | None = None,
    keep_days: int | None = None,
    policy: list[str] | None = None,
) -> None:
    """Args:
    model: A run, or a model: a folder or hub name.
    batch: Number of answers to decode at once; others wait.
    """
    is_other = any(change.startswith("model=") for change in policy or ())  # --policy names another model
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
            engine: Any = replace(subject, environment=None).rollout().engine
            engine.version = version_of(Path(subject.path)) if version is None else version
            source = subject.name if newest is None else model
            with opened(engine, batch, keeping, source, timeout, newest) as backend:
                _run(backend, listener, host)


def _newest(model: str) -> Newest | None:
    """Return the lookup of new weights for a loop, or a run that publishes them (source.kind = elsewhere)."""
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
    to: str,
    store: str | None = None,
    port: int = 0,
    host: str = "127.0.0.1",
    timeout: float = 600.0,
    keep_secrets: bool = False,
    redact_pattern: list[str] | None = None,
    keep_days: int | None = None,
    tokens: bool = False,
    key: Annotated[str, typer.Option(metavar="VARIABLE")] = "OPENAI_API_KEY",
) -> None:
    """Args:
    to: URL of the server, such as http://127.0.0.1:8000/v1.
    tokens: Request token ids and log-probs from the server too (vLLM).
    key: The environment variable with the server's API key.
    """
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
    store: The store of `agro serve` or `agro proxy`, or any other.
    overrides: Settings of the runs, such as reward.name, data.eval_prompts and train.steps.
    model: The first model: a run, or a model.
    every: Run turns forever, each after N more rewarded samples or judged pairs. Default: one turn.
    promote: Serve a model that was shown to be better, also the last turn's.
    rollback: Serve the model from before the last promotion again.
    out: The folder of the loop, for agro serve. Default: STORE with the suffix .loop.
    """
    from agro.api.loop import Loop

    turns = Loop(store, model, out, overrides or [], partial(print, file=sys.stderr, flush=True))
    if rollback:
        print(turns.roll_back())
        return
    turn = turns.promote_last() if promote else None
    if every is None and turn is None:
        turn = turns.turn(promote=promote)
    if turn is not None and turn.outcome == "refused":
        end(2, f"agro: {turn}")
    if turn is not None:
        print(turn, flush=True)
    while every is not None:
        turns.wait(every)
        print(turns.turn(promote=promote), flush=True)


def _keeping(store: str | None, patterns: list[str] | None, days: int | None, *, secrets: bool) -> Keeping:
    from agro.door.sessions import Keeping

    if store is None and days is not None:
        raise Refused("--keep-days: expected --store, which keeps the answers; got none")
    return Keeping(store, Privacy(redact=not secrets, patterns=patterns or ()), days)


def _run(backend: Any, listener: Any, host: str) -> None:
    from agro.door.app import Application
    from agro.pages.local_server import address_of, serve

    token = os.environ.get(TOKEN)
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        raise Refused(
            f"--host {host}: expected a token in {TOKEN}, since others reach this address, got none"
        )
    token = token or secrets.token_urlsafe(24)
    if ":" in token or not token.isascii():
        raise Refused(f"{TOKEN}: expected ASCII text without a colon, which separates the session")
    url = address_of(host, listener)
    if TOKEN not in os.environ:
        print(f"{TOKEN}={token}", file=sys.stderr)
    remember_secret(token)
    print(f"OpenAI: OPENAI_BASE_URL={url}/v1, Anthropic: ANTHROPIC_BASE_URL={url}", file=sys.stderr)
    serve(Application(backend, host, token).app, listener, f"serving {url}")


HELP = "/new begins a new conversation, /quit ends"
QUESTION = "better (1, 2, 0 for a tie, Enter to skip): "
RATINGS = {"1": 0, "2": 1}  # the position of the better response
TIE = "0"


def chat(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    against: str | None = None,
    max_new: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    policy: list[str] | None = None,
) -> None:
    """Args:
    model: A run, or a model: a folder or hub name.
    against: start: answer with the run's start too, blind; RUN/chat.db stores what you prefer.
    temperature: Sampling temperature; 0 is greedy.
    """
    run = run_of(model)
    check_against(against, run)
    subject = MeasuredModel.of(run, None if run is not None else model, policy, "a model")
    subject = replace(subject, environment=None)  # single questions, whatever the run's environment
    rollouts = [subject.rollout()]
    if against is not None:
        rollouts.append(subject.start())
    sampler, rng = subject.sampler(1, temperature, max_new), random.Random(seed)
    if against is None:
        _talk(rollouts, sampler, rng, None)
        return
    path = Path(model) / "chat.db"
    with Store.open(path) as judged:
        counts = _talk(rollouts, sampler, rng, judged)
        groups = judged_prompts(judged)
    print(f"preferred: {model} {counts[0]}, start {counts[1]}, ties {counts[TIE]}")
    if counts[0] + counts[1]:
        command = f"agro train pairs policy.model={subject.name} data.store={path}"
        if groups < RunConfig.load("pairs").train.groups:
            command += f" train.groups={groups}"
        print(f"{path} has the judged pairs; train with: {command}")


def run_of(name: str) -> Path | None:
    """Return a run's folder; None for a model, whose folder has a config.json too."""
    path = Path(name)
    if not path.exists() and path.parent != Path() and path.parent.is_dir():
        raise Refused(f"{name}: there is no such run or model in {path.parent}")  # without trying the hub
    is_run = (path / "model").is_dir() or (path / "metrics.jsonl").is_file()
    return path if is_run and (path / "config.json").is_file() else None


def _talk(
    rollouts: Sequence[Rollout], sampler: SamplerConfig, rng: random.Random, judged: Store | None
) -> Counter[Any]:
    """Answer each line with each model, until the user leaves. Two answers come in random order, and the user
    chooses without knowing whose they are. The choices and both responses go into `judged`.

    Returns how often each model was preferred, by its number, and ties. Without a chat template each line is
    a separate prompt.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  # enables line editing and history
    print(HELP, file=sys.stderr)
    has_turns = all(bool(rollout.encoder.chat.tokenizer.chat_template) for rollout in rollouts)
    if not has_turns:
        print("the model has no chat template: each line is a separate prompt", file=sys.stderr)
    counts, messages = Counter[Any](), list[dict[str, Any]]()
    with suppress(EOFError):
        while (line := input("> ")) != "/quit":
            if line == "/new":
                messages.clear()
            if line in ("/new", ""):
                continue
            text = [*messages, {"role": "user", "content": line}] if has_turns else line
            number = rng.getrandbits(31)
            answers = []
            for model, rollout in enumerate(rollouts):
                (sample,) = rollout.sample([Prompt(text)], 1, sampler, seed=number)
                answers.append((model, sample))
            rng.shuffle(answers)
            for position, (_, sample) in enumerate(answers, 1):
                print(f"{position}: {sample.response}" if len(answers) > 1 else sample.response)
            better, chosen = answers[0]
            if judged is not None:
                while (rated := input(QUESTION).strip()) not in (*RATINGS, TIE, ""):
                    pass
                better, chosen = answers[RATINGS.get(rated, 0)]
                if rated:
                    ids = judged.append(sample for _, sample in answers)
                    winner = RATINGS.get(rated, 0)
                    votes = (1.0, 1.0) if rated == TIE else (1.0, 0.0)
                    judged.add_pairs([Pair(ids[winner], ids[1 - winner], *votes)])
                    counts[TIE if rated == TIE else better] += 1
            messages += [
                {"role": "user", "content": line},
                {"role": "assistant", "content": chosen.response},
            ]
        return counts
    print()  # end the prompt's line
    return counts
