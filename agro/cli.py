"""The command line. Exit codes: 0 done, 2 refused, 1 our fault, 130 interrupted with everything kept for --resume."""

from __future__ import annotations

import functools
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from agro.errors import Interrupted, Refused

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Reinforcement learning for language models from any generation: fresh, replayed, logged or taught.",
)  # fmt: skip
P = ParamSpec("P")

Model = Annotated[str, typer.Option("--model", help="Folder or hub name of a causal language model.")]
PromptFile = Annotated[Path, typer.Option("--prompts", help='JSONL, one {"prompt": …, "answer": …} a line.')]
RewardName = Annotated[str, typer.Option("--reward", help="exact, regex, math, module:function or file.py:function.")]
RewardOption = Annotated[
    list[str] | None, typer.Option("--option", help="KEY=VALUE of the reward, such as marker='####'; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """What the user can mend ends with its message and 2, an interruption with 130; no traceback for either."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except Refused as error:
            _exit(2, f"agro: {error}")
        except KeyboardInterrupt:
            _exit(130, "agro: interrupted")
        except Interrupted:
            _exit(130, "")

    return run


def _exit(code: int, message: str) -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(code)


@app.command(
    epilog="Example: `agro train recipes/fresh.toml policy.model=MODEL data.prompts=prompts.jsonl --out runs/first`"
)
@guarded
def train(
    config: Annotated[Path, typer.Argument(help="A TOML recipe, or a run's config.json.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Such as train.steps=20.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/ and the time where it isn't given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """One run: from a configuration to a model, metrics and a report."""
    from agro.config import RunConfig

    loaded = RunConfig.load(config, overrides or [])
    from agro.train.loop import Trainer

    folder = Trainer(loaded, out, resume=resume).run()
    print(f"done: {folder / 'model'}, {folder / 'report.html'}", file=sys.stderr)


@app.command(epilog="Example: `agro sample --model runs/first/model --prompts prompts.jsonl --out more.db -n 4`")
@guarded
def sample(
    model: Model,
    prompts: PromptFile,
    out: Annotated[Path, typer.Option(help="A store, or a .jsonl, .jsonl.gz or .parquet file.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Responses a prompt.")] = 4,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    max_new: Annotated[int, typer.Option("--max-new", min=1, help="Tokens a response at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="1 where it isn't given.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Responses into a store, unscored."""
    from agro.config import Policy as PolicyConfig
    from agro.policy import Policy
    from agro.prompts import load_prompts
    from agro.samplers import HFSampler, Sampling
    from agro.store import Store, write_samples

    asked = load_prompts(prompts)
    as_file = out.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))
    if as_file and out.exists():
        raise Refused(f"{out}: there is such a file; give another --out, or remove it")
    if greedy and temperature is not None:
        raise Refused(f"--greedy takes the likeliest token: expected no --temperature beside it, got {temperature}")
    policy = Policy.load(PolicyConfig(model=model))
    options = Sampling(
        temperature=0.0 if greedy else 1.0 if temperature is None else temperature, max_new=max_new, seed=seed
    )
    found = (s.replace(source=model) for s in HFSampler(policy).sample(asked, n, options))
    count = 0
    if as_file:
        count = write_samples(out, sorted(found, key=lambda s: int(s.meta["index"])))
    else:
        with Store.open(out) as store:
            while part := list(islice(found, 64)):  # what is finished is kept, whatever happens next
                count += len(store.append(part))
    print(f"{count} responses to {len(asked)} prompts in {out}", file=sys.stderr)


@app.command(
    "import", epilog="Example: `agro import log.jsonl.gz --store logs.db --map prompt=question --map response=output`"
)
@guarded
def import_(
    files: Annotated[list[Path], typer.Argument(help="JSONL, gzipped or not, or Parquet.")],
    store: Annotated[Path, typer.Option("--store", help="The store; made where it isn't there.")],
    format: Annotated[
        str | None, typer.Option("--format", help="The files' format, where it isn't recognised.")
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", help="FIELD=COLUMN: a dotted path; * expands over the keys of an object."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts of rows that hold none, joined by their id.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Encode with this model's tokenizer, and count what can't be.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Logged responses into a store; says what was recognised, taken and refused."""
    from agro.store import Store, import_files

    mapping = _pairs(map_, "--map", "FIELD=COLUMN")
    is_new = not store.exists()
    try:
        with Store.open(store) as opened:
            done = import_files(opened, files, mapping=mapping, prompts=prompts, format=format)
            report = done.to_json()
            if tokenizer:
                report["encoding"] = _encoding(opened, tokenizer)
    except Refused:
        if is_new and not _holds_samples(store):  # leave nothing behind that looks like a store
            for left in ("", "-wal", "-shm"):
                Path(f"{store}{left}").unlink(missing_ok=True)
        raise
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(done)
    if tokenizer:
        print("encoding: " + ", ".join(f"{k} {v}" for k, v in report["encoding"].items()))


def _holds_samples(path: Path) -> bool:
    from agro.store import Store

    if not path.exists():
        return False
    with Store.open(path, read_only=True) as store:
        return store.counts().samples > 0


def _encoding(store: Any, tokenizer: str) -> dict[str, int]:
    """How many samples a policy with this tokenizer could train on, and why the others not."""
    from agro.config import Policy as PolicyConfig
    from agro.policy import Policy, Unusable

    policy, counts = Policy.load(PolicyConfig(model=tokenizer)), Counter[str]()
    for sample in store.samples():
        try:
            policy.encode(sample)
            counts["usable"] += 1
        except Unusable as error:
            counts[error.reason] += 1
    return dict(counts)


@app.command(epilog="Example: `agro check logs.db --objective grpo`")
@guarded
def check(
    path: Annotated[Path, typer.Argument(metavar="FILE-or-STORE", help="A store, or a file of records.")],
    objective: Annotated[str, typer.Option(help="The objective that is to train on it.")] = "agro",
    as_json: Json = False,
) -> None:
    """What is in a store or file, before training; exit 2 where the objective can't train on it."""
    import tempfile

    from agro.config import RunConfig
    from agro.store import Store, import_files
    from agro.train.data import check_store

    with tempfile.TemporaryDirectory() as folder:
        is_file = path.name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet"))
        with Store.open(Path(folder) / "store.db") if is_file else Store.open(path, read_only=True) as store:
            if is_file:
                import_files(store, [path])
            groups = store.groups()
            report = {
                **store.counts().to_json(), "groups_equal": sum(g.scored > 1 and g.reward_min == g.reward_max for g in groups),
                "groups_of_one": sum(g.size == 1 for g in groups), "objective": objective, "trainable": True, "problem": None,
            }  # fmt: skip
            try:
                check_store(RunConfig.of({"objective": {"name": objective}}), store)
            except Refused as error:
                report |= {"trainable": False, "problem": str(error)}
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for key, value in report.items():
            if key != "problem":
                print(f"{key}: {value}")
    if not report["trainable"]:
        _exit(2, f"agro: {report['problem']}")


@app.command(epilog="Example: `agro score logs.db --reward rewards.py:length`")
@guarded
def score(
    store: Annotated[Path, typer.Argument(help="The store.")],
    reward: RewardName,
    option: RewardOption = None,
    missing: Annotated[bool, typer.Option("--missing", help="Only samples without a reward.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one response.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Fill in or renew the rewards of a store."""
    from agro.config import Reward as RewardConfig
    from agro.rewards import load_reward
    from agro.store import Store

    scorer = load_reward(RewardConfig(name=reward, options=_options(option), timeout=timeout))
    done: dict[str, Any] = {"scored": 0, "failed": 0, "kept": 0, "errors": {}}
    try:
        with Store.open(store, create=False) as opened:
            samples = opened.samples(scored=False) if missing else opened.samples()
            while part := list(islice(samples, 256)):
                scores = scorer.score(part)
                opened.set_rewards(
                    (s.id, x.value, {"reward_error": x.error} if x.error else {})
                    for s, x in zip(part, scores, strict=True)
                    if s.id is not None and (x.value is not None or s.reward is None)  # a failure erases no reward
                )
                for s, x in zip(part, scores, strict=True):
                    done["scored" if x.value is not None else "failed" if s.reward is None else "kept"] += 1
                    if x.error:
                        done["errors"][x.error] = done["errors"].get(x.error, 0) + 1
    finally:
        scorer.close()
    if as_json:
        print(json.dumps(done, ensure_ascii=False))
    else:
        print(
            f"{done['scored']} scored, {done['failed']} without a reward, {done['kept']} failed and keep their old one"
        )
        for error, count in sorted(done["errors"].items(), key=lambda item: -item[1])[:5]:
            print(f"  {count} × {error}")
    if done["errors"] and not done["scored"]:
        cause = next(iter(done["errors"]))
        raise Refused(f"--reward {reward}: no response could be scored (for one: {cause}); mend the reward")


@app.command(
    "eval", epilog="Example: `agro eval --model runs/first/model --prompts held_out.jsonl --reward exact -n 8`"
)
@guarded
def eval_(
    model: Model,
    prompts: PromptFile,
    reward: RewardName,
    option: RewardOption = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Responses a prompt.")] = 8,
    max_new: Annotated[int, typer.Option("--max-new", min=1, help="Tokens a response at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Accuracy, pass@k and their 95 % intervals."""
    from agro.config import Policy as PolicyConfig
    from agro.config import Reward as RewardConfig
    from agro.evaluate import heldout
    from agro.policy import Policy
    from agro.prompts import load_prompts
    from agro.rewards import load_reward
    from agro.samplers import HFSampler, Sampling

    asked = load_prompts(prompts)
    scorer = load_reward(RewardConfig(name=reward, options=_options(option)))
    try:
        sampler = HFSampler(Policy.load(PolicyConfig(model=model)))
        found = heldout(sampler, scorer, asked, n, Sampling(temperature=temperature, max_new=max_new, seed=seed))
    finally:
        scorer.close()
    report = {"model": model, "prompts": len(asked), "n": n, "temperature": temperature, **found.to_json()}
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"{len(asked)} prompts × {n} responses of {model} at temperature {temperature}")
    for key, row in report.items():
        if isinstance(row, dict):
            print(
                f"{key}: "
                + ("unknown" if row["value"] is None else f"{row['value']:.4f}  [{row['low']:.4f}, {row['high']:.4f}]")
            )
    if found.unscored:
        print(f"{found.unscored} responses couldn't be scored and count nowhere")
        for error, count in Counter(found.errors).most_common(3):
            print(f"  {count} × {error}")


@app.command(epilog="Example: `agro report runs/first`")
@guarded
def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """A run's figures as one self-contained page."""
    from agro.report import report as write_report

    print(write_report(run))


def _pairs(items: list[str] | None, flag: str, form: str) -> dict[str, str]:
    found = {}
    for item in items or []:
        key, eq, value = item.partition("=")
        if not (key and eq and value):
            raise Refused(f"{flag} {item!r}: expected {form}")
        if key in found:
            raise Refused(f"{flag}: {key} is given twice")
        found[key] = value
    return found


def _options(items: list[str] | None) -> dict[str, Any]:
    """KEY=VALUE with a TOML value; a bare word is text."""
    found: dict[str, Any] = {}
    for key, raw in _pairs(items, "--option", "KEY=VALUE").items():
        try:
            found[key] = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = raw
    return found


def main() -> None:
    app(prog_name="agro")


if __name__ == "__main__":
    main()
