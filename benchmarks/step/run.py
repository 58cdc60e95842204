"""The training part of a step: reference log-probs, gradient and update, and the output layer by itself.

    python benchmarks/step/run.py [--cases "mid mixed" …] [--repeats 5] [--tiny FOLDER]
    python benchmarks/step/run.py --check [--before CHECKOUT]

`tiny` is a trained model of 2.4M parameters (see --tiny; skipped where it isn't there), `mid` one of 34M
with random weights. Measured is a step of RLOO with a reference on random tokens, on one thread: CPU
seconds, the memory that it adds to the process at most, tokens per second, and the useful operations per
second as a share of those of a matrix product measured in the same process. Its peer is the plain way,
all logits of a pass and log_softmax, in turns with it; memory is that of a process of its own.

Replaces the rows of these cases on this kind of machine in benchmarks/results/step.json. --check writes
nothing, and fails where the plain way's seconds over ours are more than 5% below what was recorded on this
kind of machine: the median of pairs in turns, and where that is so, of twice as many. With --before it is
compared with that checkout, measured in the same run. A kind of machine without a record is named, and
nothing is compared.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))  # last, so that --before imports the agro of its checkout

from benchmarks import recording  # noqa: E402
from benchmarks.scaling import predicted  # noqa: E402

RESULTS = ROOT / "benchmarks/results/step.json"
TINY = ROOT.parent / "shared/peers/trl/models/tiny"
TOLERATED = 0.95  # of a recorded ratio
CHECKED = ("head float32", "tiny float32", "mid float32", "mid mixed")  # by --check: those of a few minutes
SHAPES = {"tiny": (16, 4, 16, 64), "mid": (2, 4, 16, 256)}  # groups, responses, prompt and response tokens
CASES = ("head float32", "head4096 float32", "tiny float32", "mid float32", "mid mixed")
GOAL = 1.0  # CPU seconds of the plain way over ours
HEADS = {"head": (152_000, 512, 512), "head4096": (152_000, 4096, 512)}  # vocabulary, positions, width


def step_of(model: str, dtype: str, tiny: Path, scratch: Path) -> tuple[Callable[[], None], float, int]:
    """A function that makes one step, its useful operations, and its tokens."""
    from agro import objectives
    from agro.config import RunConfig
    from agro.models.policy import Policy
    from agro.models.reference import frozen
    from agro.train.learner import Local
    from agro.types import Batch

    if model == "mid":
        predicted.random_model(scratch, "34M")
    folder = tiny if model == "tiny" else scratch
    policy_config = {"model": str(folder), "dtype": dtype, "device": "cpu"}
    config = RunConfig.of({"policy": policy_config, "objective": {"name": "rloo", "beta": 0.05}})
    policy = Policy.load(config.policy)
    learner = Local(policy, frozen(policy), lambda text: None)
    learner.enter(config, began=None, resumed=None)
    groups, size, prompt, new = SHAPES[model]
    rows, width = groups * size, prompt + new
    random = torch.Generator().manual_seed(0)
    batch = Batch.of(
        mask=(torch.arange(width) >= prompt).expand(rows, width),
        reward=torch.rand(rows, generator=random).tolist(),
        group=[i // size for i in range(rows)],
        tokens=torch.randint(3, policy.vocab_size, (rows, width), generator=random),
        lengths=[width] * rows,
    )
    name = config.objective.name
    options = objectives.get(name).resolve(name, config.objective.options)

    def step() -> None:
        known = batch.replace(ref_logp=learner.logp(batch, "reference"))
        learner.gradient(known, name, options, lambda: None)
        learner.move(1e-5)

    c = policy.model.config
    head = policy.vocab_size * c.hidden_size
    body = sum(p.numel() for n, p in policy.model.named_parameters() if p.dim() == 2 and "layers" in n)
    attention = 2 * c.num_hidden_layers * width * c.hidden_size // 2  # multiplications per token, causal
    products = rows * width * (body + attention) + rows * new * head
    return step, 2.0 * 4 * products, rows * width  # the reference, forward, and twice as much backward


def head_of(name: str) -> tuple[Callable[[], None], float, int]:
    """Log-probs of one large vocabulary, forward and backward, without a model."""
    from agro.models import policy
    from agro.models.logprobs import Head, Outputs

    vocabulary, positions, width = HEADS[name]
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, positions + 1, width), generator=random).requires_grad_()
    weight = torch.randn((vocabulary, width), generator=random).mul_(0.05).requires_grad_()
    tokens = torch.randint(0, vocabulary, (1, positions + 1), generator=random)
    mask = torch.arange(positions + 1)[None] > 0

    def step() -> None:
        hidden.grad = weight.grad = None
        streams = policy.token_streams(Outputs(hidden, Head(weight)), tokens, mask)
        streams["logp"][mask].sum().backward()

    return step, 2.0 * 3 * positions * vocabulary * width, positions


def plain_streams(outputs: Any, tokens: Any, mask: Any, *, temperature: float = 1.0, **_: Any) -> Any:
    """Log-probs from all logits."""
    hidden, head = outputs[0], outputs[1]
    logits = torch.nn.functional.linear(hidden[:, :-1], head.weight, head.bias).float()
    if temperature != 1:
        logits = logits / temperature
    logp = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None].long())[..., 0]
    return {"logp": torch.nn.functional.pad(logp, (1, 0)).masked_fill(~mask, math.nan)}


def product_rate(dtype: torch.dtype) -> float:
    """Operations per second of a matrix product of 2,048 rows: the best of ten."""
    a, b = torch.rand(2048, 512, dtype=dtype), torch.rand(512, 2048, dtype=dtype)
    seconds = []
    for _ in range(10):
        began = time.process_time()
        for _ in range(4):
            a @ b
        seconds.append((time.process_time() - began) / 4)
    return 2.0 * 2048 * 512 * 2048 / min(seconds)


def measure(case: str, repeats: int, tiny: str, ways: list[str]) -> dict[str, Any]:
    """CPU seconds of the ways in turns after a first turn, or without repeats the bytes that it adds."""
    from agro.models import policy

    torch.set_num_threads(1)
    model, dtype = case.split()
    with tempfile.TemporaryDirectory() as scratch:
        step, operations, tokens = (
            head_of(model) if model in HEADS else step_of(model, dtype, Path(tiny), Path(scratch))
        )
    streams = {"ours": policy.token_streams, "peer": plain_streams}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way in ways:
            policy.token_streams = streams[way]
            began = time.process_time()
            step()
            if turn:
                seconds[way].append(time.process_time() - began)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if not repeats:
        return {"added": added * 1024}
    rate = product_rate(torch.float32 if dtype == "float32" else torch.bfloat16)
    used = statistics.median(seconds["ours"])
    return seconds | {
        "tokens_per_second": tokens / used,
        "share_of_product_rate": operations / used / rate,
        "product_rate": rate,
    }


def measured(case: str, repeats: int, tiny: Path, ways: list[str], checkout: Path = ROOT) -> dict[str, Any]:
    """`measure` in a process of its own, with the agro of this checkout."""
    found: dict[str, Any] = recording.apart(__file__, checkout, "measure", case, repeats, str(tiny), ways)
    return found


def is_missing(case: str, asked: Any) -> bool:
    if case.startswith("tiny") and not asked.tiny.is_dir():
        print(f"{case}: skipped: {asked.tiny} isn't there; name the model's folder with --tiny", flush=True)
        return True
    return False


def record(asked: Any) -> None:
    """Measure every case that can be measured here. Rows of other cases and kinds of machines stay."""
    for case in asked.cases:
        if is_missing(case, asked):
            continue
        found = turns(case, asked)
        ours, peer = found.pop("ours"), found.pop("peer")
        for way in ("ours", "peer"):
            found[f"{way}_memory"] = measured(case, 0, asked.tiny, [way])["added"]
        found["memory"] = found["ours_memory"] / found["peer_memory"]
        ratio = statistics.median(peer) / statistics.median(ours)
        found["machine"] = recording.machine_of_models()
        row = recording.row(case, ours, goal=GOAL, ratio=ratio, peer=peer, **found)
        print(f"{case}: {ratio:.2f} of the plain way's speed", flush=True)
        known = {(row["name"], kind(row["machine"])): row for row in [*json.loads(RESULTS.read_text()), row]}
        recording.write(RESULTS, known.values())


def kind(machine: str) -> str:
    """Of machines whose ratios are compared: processor and cores, without versions."""
    return ", ".join(machine.split(", ")[:2])


def ratio_of(found: dict[str, Any]) -> float:
    """The plain way over ours: the median of pairs in turns, which a machine that slows down leaves alone."""
    return statistics.median(peer / ours for ours, peer in zip(found["ours"], found["peer"], strict=True))


def is_slower(found: dict[str, Any], recorded: dict[str, Any]) -> bool:
    return ratio_of(found) < TOLERATED * ratio_of(recorded)


def check(asked: Any) -> int:
    """1 where a case is slower than before beside the plain way, also when it is measured again."""
    here, failed = kind(recording.machine_of_models()), False
    rows = [row for row in json.loads(RESULTS.read_text()) if row["ours"] and kind(row["machine"]) == here]
    known = {row["name"]: row for row in rows}
    for case in asked.cases:
        if is_missing(case, asked):
            continue
        if asked.before:
            known[case] = turns(case, asked, asked.before.resolve())
        if case not in known:
            print(f"{case}: not compared: {RESULTS.name} has no row of {here}; give --before CHECKOUT")
            continue
        found = turns(case, asked)
        if is_slower(found, known[case]):
            again = turns(case, asked)
            found = {way: found[way] + again[way] for way in ("ours", "peer")}
        slower = is_slower(found, known[case])
        times = f"{ratio_of(found):.2f} times as fast as the plain way, before {ratio_of(known[case]):.2f}"
        verdict = f": more than {1 - TOLERATED:.0%} slower" if slower else ""
        print(f"{case}: {times}, {len(found['ours'])} turns{verdict}", flush=True)
        failed |= slower
    return int(failed)


def turns(case: str, asked: Any, checkout: Path = ROOT) -> dict[str, Any]:
    return measured(case, asked.repeats, asked.tiny, ["ours", "peer"], checkout)


def main() -> int:
    options = {"cases": CASES, "repeats": 5, "before": Path, "tiny": TINY, "check": False}
    parser = recording.parser(__doc__, **options)
    parser.set_defaults(cases=None)
    asked = parser.parse_args()
    if asked.cases is None:
        asked.cases = CHECKED if asked.check else list(CASES)
    if asked.check:
        return check(asked)
    record(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
