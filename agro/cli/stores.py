"""Commands that score, export, copy, recover and delete what stores have."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from agro.cli.common import REWARD, Json, RewardOption, options, pairs, policy_config
from agro.cli.run_models import MeasuredModel
from agro.config import RewardConfig
from agro.errors import Refused
from agro.io.files import complete_folder
from agro.rewards import check_name, load_reward
from agro.store import Store
from agro.store import recover as recover_
from agro.types import Sample


def export(
    store: Annotated[Path, typer.Argument(metavar="STORE-or-RUN")],
    file: Annotated[Path, typer.Argument()],
    merged: bool = False,
    gguf: bool = False,
    as_json: Json = False,
) -> None:
    """Write the samples of a store, without judgments, as interchange records, which agro import takes.

    Args:
        store: The store; a run with its model.
        file: A file that ends with .jsonl, .jsonl.gz or .parquet; of a model a folder or FILE.gguf.
        merged: Of a run: its model in 16 bits, an adapter merged, as a folder.
        gguf: Of a run: its model as GGUF, by the converter of llama.cpp.
    """
    if merged or gguf:
        if merged and gguf:
            raise Refused("--merged, --gguf: expected one of them, got both")
        (write_gguf if gguf else write_merged)(store, file)
        print(json.dumps({"model": str(file)}) if as_json else f"wrote {file}")
        return
    with Store.open(store, read_only=True) as opened:
        count = opened.export(file)
    print(json.dumps({"samples": count, "file": str(file)}) if as_json else f"{file}: {count} samples")


def recover(
    store: Annotated[Path, typer.Argument()],
    out: Path,
    as_json: Json = False,
) -> None:
    """Args:
    store: The damaged store.
    out: The new store.
    """
    recovered = recover_(store, out)
    print(json.dumps(recovered.to_json(), ensure_ascii=False) if as_json else recovered)


def score(
    store: Annotated[Path, typer.Argument()],
    reward: Annotated[str, REWARD],
    option: RewardOption = None,
    missing: bool = False,
    timeout: float = 10.0,
    workers: Annotated[int, typer.Option(min=1, metavar="N")] = 1,
    as_json: Json = False,
) -> None:
    """Args:
    store: The store.
    missing: Only samples without a reward.
    timeout: Seconds for one response.
    workers: Processes of a reward that has some: functions, math, regex.
    """
    Store.open(store, create=False).close()  # refused before torch is imported: that takes seconds
    check_name(reward)
    from agro.rollout.rollout import EpisodeReward

    config = RewardConfig(name=reward, options=options(option), timeout=timeout, workers=workers)
    done: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    with closing(EpisodeReward(load_reward(config))) as scorer, Store.open(store, create=False) as opened:
        samples = opened.samples(scored=False) if missing else opened.samples()
        for part in _complete_episodes(samples, 256):
            metas = [{k: v for k, v in s.meta.items() if k != "reward_error"} for s in part]
            scores = scorer.score([s.replace(reward=None, meta=m) for s, m in zip(part, metas)])
            changed = []
            for s, x in zip(part, scores, strict=True):
                outcome = "scored"
                if x.value is None:
                    outcome = "failed" if s.reward is None else "kept"
                done[outcome] += 1
                if x.error:
                    errors[x.error] += 1
                if s.id is not None and outcome != "kept":  # a failure doesn't delete a reward
                    changed.append((s.id, x.value, x.meta))
            opened.set_rewards(changed)
    if as_json:
        counts = {name: done[name] for name in ("scored", "failed", "kept")}
        print(json.dumps({**counts, "errors": errors}, ensure_ascii=False))
    else:
        print(
            f"{done['scored']} scored, {done['failed']} without a reward, {done['kept']} failed and keep "
            "their old one"
        )
        for error, count in errors.most_common(5):
            print(f"  {count} × {error}")
    if errors and not done["scored"]:
        cause = next(iter(errors))
        raise Refused(f"--reward {reward}: no response could be scored (for one: {cause}); fix the reward")


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


CONVERTER = "convert_hf_to_gguf.py"  # of llama.cpp, which keeps it up to date with architectures


def write_merged(run: Path, folder: Path) -> None:
    """Write the model of a run, or a model's folder, in bfloat16, an adapter merged into it."""
    import torch

    from agro.models.policy import Policy

    if folder.exists():
        raise Refused(f"{folder}: there is such a file or folder; give another one, or remove it")
    is_run = (run / "metrics.jsonl").is_file()
    name = MeasuredModel.of(run, None, flag="another run").name if is_run else str(run)
    policy = Policy.load(policy_config(name, None))
    policy.model.to(torch.bfloat16)
    with complete_folder(folder) as unfinished:
        policy.save(unfinished)


def write_gguf(run: Path, file: Path) -> None:
    """Convert the merged model with llama.cpp's converter. Without one the merged model stays beside `file`,
    and `Refused` says the command."""
    if file.exists():
        raise Refused(f"{file}: there is such a file; give another one, or remove it")
    merged = file.with_name(f"{file.stem}-merged")
    write_merged(run, merged)
    of_folder = Path(os.environ.get("LLAMA_CPP", "")) / CONVERTER
    converter = str(of_folder) if of_folder.is_file() else shutil.which(CONVERTER)
    command = [converter or f"llama.cpp/{CONVERTER}", str(merged), "--outfile", str(file)]
    command += ["--outtype", "bf16"]
    if converter is None:
        raise Refused(
            f"--gguf: {CONVERTER} of llama.cpp is neither on PATH nor in the folder LLAMA_CPP. The merged "
            f"model is in {merged}. What to do: get llama.cpp, then\n  python {shlex.join(command)}"
        )
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode or not file.exists():
        raise Refused(
            f"--gguf: {converter} failed: {done.stderr.strip()[-500:]}\nThe merged model is in {merged}"
        )
    shutil.rmtree(merged)


TIMEOUT = 3.0  # seconds to wait for others to close the store


def forget(
    store: Annotated[Path, typer.Argument()],
    source: str | None = None,
    prompt_id: str | None = None,
    meta: Annotated[str | None, typer.Option(metavar="KEY=VALUE")] = None,
    yes: bool = False,
    as_json: Json = False,
) -> None:
    """Args:
    store: The store.
    source: All samples of this source.
    prompt_id: All samples of this prompt.
    meta: All whose meta has this, such as user=alice.
    yes: Delete; without it, only what would be said.
    """
    conditions = {"--source": source, "--prompt-id": prompt_id, "--meta": meta}
    flags = [flag for flag, value in conditions.items() if value is not None]
    if len(flags) != 1:
        raise Refused(f"expected one of {', '.join(conditions)}, got {' and '.join(flags) or 'none'}")
    in_meta = None if meta is None else next(iter(pairs([meta], "--meta", "KEY=VALUE").items()))
    with Store.open(store, create=False, timeout=TIMEOUT) as opened:
        ids = opened.experience.find(source=source, prompt_id=prompt_id, meta=in_meta)
        if not ids:
            raise Refused(
                f"{store}: no sample has {flags[0]} {conditions[flags[0]]}; see agro show and agro check"
            )
        trained = opened.draws.trained(ids)
        report: dict[str, Any] = {"samples": len(ids), "runs": [run._asdict() for run in trained]}
        runs = "".join(f"\n  {run}" for run in trained)
        runs_text = f"runs that trained on them:{runs}" if trained else "no run trained on them"
        if not yes:
            raise Refused(
                f"{store}: {len(ids)} samples would be deleted for good; {runs_text}\n"
                "Add --yes to delete them"
            )
        opened.imports.forget(ids)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"deleted: {len(ids)} samples, with their judgments, from {shlex.quote(str(store))}\n{runs_text}")
    if trained:
        print(
            "Their weights, pages (report.html) and logs still have what they learned or showed of these "
            "samples; delete those, or train again. A run that is resumed draws from what is left."
        )


class Action(Enum):
    copy = "copy"
    join = "join"


def store(
    action: Annotated[
        Action,
        typer.Argument(
            help="copy: a store to a new one, a file or postgresql://…; join: make one of several that "
            "earlier versions had as one."
        ),
    ],
    stores: Annotated[list[Path], typer.Argument(help="copy: OLD and NEW. join: all, in order, and OUT.")],
) -> None:
    least, expected = (2, "A B") if action is Action.copy else (3, "A.db B.db OUT.db")
    if len(stores) < least or (action is Action.copy and len(stores) > least):
        given = " ".join(map(str, stores))
        raise Refused(f"agro store {action.value}: expected {expected}, got {given}")
    from agro.store.copying import copy, join

    *old, out = stores
    if action is Action.copy:
        copy(old[0], out)
    else:
        join(old, out)
    with Store.open(out, read_only=True) as made:
        counts = made.counts()
        print(f"{out}: {counts.samples} samples in {counts.groups} groups")
