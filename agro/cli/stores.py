"""Commands that export, recover and score stores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import REWARD, Json, RewardOption, options
from agro.errors import Refused

if TYPE_CHECKING:
    from agro.types import Sample


def _complete_episodes(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """`samples` in parts of about `size`; the rows of an episode, which follow each other, share a part."""
    part: list[Sample] = []
    for sample in samples:
        if len(part) >= size and (sample.episode is None or sample.episode != part[-1].episode):
            yield part
            part = []
        part.append(sample)
    if part:
        yield part


def _unscored(sample: Sample) -> Sample:
    return sample.replace(reward=None, meta={k: v for k, v in sample.meta.items() if k != "reward_error"})


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE-or-RUN", help="The store; a run with its model.")],
    file: Annotated[
        Path,
        typer.Argument(help="A file that ends with .jsonl, .jsonl.gz or .parquet; of a model see below."),
    ],
    merged: Annotated[
        bool, typer.Option("--merged", help="Of a run: its model in 16 bits, an adapter merged, as a folder.")
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Of a run: its model as GGUF, by the converter of llama.cpp.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the samples of a store, without judgments, as interchange records, which agro import takes."""
    if merged or gguf:
        from agro.cli.model_export import write_gguf, write_merged

        if merged and gguf:
            raise Refused("--merged, --gguf: expected one of them, got both")
        (write_gguf if gguf else write_merged)(store, file)
        print(json.dumps({"model": str(file)}) if as_json else f"wrote {file}")
        return
    from agro.store import Store

    with Store.open(store, read_only=True) as opened:
        count = opened.export(file)
    print(json.dumps({"samples": count, "file": str(file)}) if as_json else f"{file}: {count} samples")


def recover(
    store: Annotated[Path, typer.Argument(help="The damaged store.")],
    out: Annotated[Path, typer.Option("--out", help="The new store.")],
    as_json: Json = False,
) -> None:
    from agro.store import recover as recover_

    recovered = recover_(store, out)
    print(json.dumps(recovered.to_json(), ensure_ascii=False) if as_json else recovered)


def score(
    store: Annotated[Path, typer.Argument(help="The store.")],
    reward: Annotated[str, REWARD],
    option: RewardOption = None,
    missing: Annotated[bool, typer.Option("--missing", help="Only samples without a reward.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one response.")] = 10.0,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Processes of a reward that has some: functions, math, regex.",
        ),
    ] = 1,
    as_json: Json = False,
) -> None:
    from agro.config import RewardConfig
    from agro.store import Store

    Store.open(store, create=False).close()  # refused before torch is imported: that takes seconds
    from agro.rewards import check_name, load_reward

    check_name(reward)
    from agro.rollout.rollout import EpisodeReward

    config = RewardConfig(name=reward, options=options(option), timeout=timeout, workers=workers)
    scorer = EpisodeReward(load_reward(config))
    done: dict[str, Any] = {"scored": 0, "failed": 0, "kept": 0, "errors": {}}
    try:
        with Store.open(store, create=False) as opened:
            samples = opened.samples(scored=False) if missing else opened.samples()
            for part in _complete_episodes(samples, 256):
                scores = scorer.score([_unscored(s) for s in part])
                changed = []
                for s, x in zip(part, scores, strict=True):
                    outcome = "scored"
                    if x.value is None:
                        outcome = "failed" if s.reward is None else "kept"
                    done[outcome] += 1
                    if x.error:
                        done["errors"][x.error] = done["errors"].get(x.error, 0) + 1
                    if s.id is not None and outcome != "kept":  # a failure doesn't delete a reward
                        changed.append((s.id, x.value, x.meta))
                opened.set_rewards(changed)
    finally:
        scorer.close()
    if as_json:
        print(json.dumps(done, ensure_ascii=False))
    else:
        print(
            f"{done['scored']} scored, {done['failed']} without a reward, {done['kept']} failed and keep "
            "their old one"
        )
        for error, count in sorted(done["errors"].items(), key=lambda item: -item[1])[:5]:
            print(f"  {count} × {error}")
    if done["errors"] and not done["scored"]:
        cause = next(iter(done["errors"]))
        raise Refused(f"--reward {reward}: no response could be scored (for one: {cause}); fix the reward")
