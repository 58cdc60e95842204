"""Settings that contradict each other are refused by name when a run is made, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused

Changes = dict[str, Any]
HELD: Changes = {"data__eval_prompts": "held.jsonl"}
EACH: Changes = {"evaluate__every": 1}
GROUPS: Changes = EACH | {"data__hold_out": 0.4, "data__store": "log.db"}
HALF_VARIANCE: Changes = GROUPS | {"evaluate__metric": "eval_consistency"}
TARGET_KL: Changes = EACH | {"evaluate__target_kl": 1.0}
LOG: Changes = {"data__replay": 1.0}
RATIOS: Changes = {"sampler__top_p": 0.8, "objective": {"name": "grpo"}}
TUNED: Changes = {"objective__beta": {"start": 0.02, "target_kl": 0.3, "rate": 0.2}}
ON_POLICY: Changes = {"objective": {"name": "agro_onpolicy", "beta": 0.1}}


def server(**engine: Any) -> Changes:
    return {"engine": {"kind": "server", "url": "http://127.0.0.1:9", **engine}}


def phases(*changes: Changes) -> Changes:
    return {"phases": [{"name": name, **each} for name, each in zip("abc", changes)]}


def beta(**values: Any) -> Changes:
    return {"objective": {"name": "agro", "beta": values}}


REFERENCES: list[tuple[Changes, str]] = [
    ({"policy__reference": "ema"}, r'policy\.reference_decay and policy\.reference = "ema" go together'),
    ({"policy__reference_every": 3}, r'reference_every and policy\.reference = "periodic" go together'),
    (
        {"policy__reference": "ema", "policy__reference_decay": 0.9, "policy__dtype": "bfloat16"},
        r'policy\.reference = "ema" .* policy\.dtype = "bfloat16"',
    ),
    ({"policy__cache_reference": True, "objective": {"name": "sft"}}, r"policy\.cache_reference "),
    ({"policy__lora": {}}, r"\[policy\.lora\] adapts a trained model, but policy\.new"),
    ({"policy__reference": "phase"} | phases({}, {"policy": {"reference": "start"}}), r"a: phase, b: start"),
]
PHASES: list[tuple[Changes, str]] = [
    (phases({"policy": {"temperature": 2.0}}, {}), r"a phase can't change \[policy\]"),
    (phases({"policy": {"temperature": 2.0}}), r"a phase can't change \[policy\]"),
    (phases({"reward": {"name": "exact"}}, {}), r"a phase can't change \[reward\]"),
    (phases({"data": {"prompts": "other.jsonl"}}), r"phase a: a phase can't change data\.prompts"),
    (phases({"train": {"push": "me/it"}}), r"phase a: a phase can't change train\.push"),
    (HELD | phases({"evaluate": {"metric": "eval_auc"}}), r"a phase can't change evaluate\.metric"),
    (phases({"guard": {"kl": 1.0, "action": "skip"}}), r'phase a: guard\.kl and guard\.action = "skip"'),
]
GUARDS: list[tuple[Changes, str]] = [
    ({"guard": {"kl": 1.0, "action": "skip"}}, r'guard\.kl and guard\.action = "skip"'),
    (
        {"guard": {"kl": 1.0}, "objective": {"name": "rloo", "beta": 0.0}},
        r"guard\.kl: .* would watch nothing",
    ),
]
FOLLOWED: list[tuple[Changes, str]] = [
    ({"evaluate__patience": 2}, r"evaluate\.patience = 2 .* data\.eval_prompts"),
    (EACH | {"evaluate__patience": 2}, r"evaluate\.patience = 2 .* data\.eval_prompts .*data\.hold_out"),
    (EACH | {"evaluate__keep_best": True}, r"evaluate\.keep_best = True .* no phase makes any"),
    (EACH | {"evaluate__target": 0.0}, r"evaluate\.target = 0\.0 .* no phase makes any"),
    (EACH | {"evaluate__metric": "eval_auc"}, r"metric = eval_auc is measured on held-out groups"),
    (EACH | {"evaluate__metric": "eval_log_ratio_best"}, r"is measured on held-out groups"),
    (GROUPS | {"evaluate__metric": "eval_reward"}, r"metric = eval_reward is measured on data\.eval_prompts"),
    (HALF_VARIANCE | {"objective": {"name": "sft"}}, r"metric = eval_consistency .* a β \(evaluate\.beta\)"),
    (HALF_VARIANCE | beta(start=0.1, end=0.2, steps=3), r"eval_consistency compares .* needs one β"),
    (
        HALF_VARIANCE | phases({}, {"objective": {"beta": 0.3}}),
        r"eval_consistency compares .*got 0\.1, 0\.3",
    ),
    (TARGET_KL, r"evaluate\.target_kl = 1 .* which no phase measures"),
    (TARGET_KL | HELD | {"evaluate__kl": False}, r"evaluate\.target_kl = 1 .* which no phase measures"),
    (TARGET_KL | HELD | {"evaluate__every": 0}, r"evaluate\.target_kl = 1 acts at evaluations"),
    (EACH | {"evaluate__target_kl": 0.0}, r"evaluate\.target_kl"),
]
BETAS: list[tuple[Changes, str]] = [
    ({"objective__beta": {"start": 0.1, "target_kl": 0.0, "rate": 0.1}}, "numbers above 0"),
    ({"objective__beta": {"target_kl": 1.0, "rate": 0.1}}, "expected {start, target_kl, rate}"),
    (TUNED | LOG | {"evaluate__kl_samples": 0}, "follows kl_ref"),
    (TUNED | LOG | {"evaluate__every": 0}, "follows kl_ref"),
    ({"objective": {"name": "kl_pg", "beta": TUNED["objective__beta"]}}, "follows kl_ref"),
    (beta(start=1.0), "schedule of an option"),
    (beta(start="a", end=1, steps=2), "schedule of an option"),
    (beta(start=1, end=0, steps="x"), "schedule of an option"),
    (beta(start=True, end=0, steps=1), "schedule of an option"),
]
SAMPLES: list[tuple[Changes, str]] = [
    (ON_POLICY | {"train__updates": 2}, r"agro_onpolicy needs .*staleness 0.* train\.updates = 2"),
    (ON_POLICY | {"source__sync_every": 2}, r"sync_every = 2 samples are stale.* do: source\.sync_every = 1"),
    (
        {"data": {"store": "log.db", "replay": 1.0}, "objective": {"name": "grpo", "ratio": "old"}},
        r"old_logp \(the trainer's log-probs when its samples were made\), but data\.replay = 1",
    ),
    (RATIOS | {"sampler__keep_sets": False}, r'top_p 0\.8: .*kind = "hf" and sampler\.keep_sets = true'),
    (RATIOS | server(), r'top_p 0\.8: .*engine\.kind = "hf"'),
    (RATIOS | {"sampler__temperature": 0.0}, r"temperature 0, top_p 0\.8: .*: sample without it, or use"),
    (RATIOS | {"sampler__keep_sets": True} | server(), "keep_sets and engine"),
    (
        {"data__spread": True, "objective": {"name": "dpo", "beta": 0.1}} | LOG,
        "data.spread = true .*, but objective dpo draws judged pairs",
    ),
    (
        {"data__spread": 0.1, "objective": {"name": "sft"}, "data__best_of_group": True},
        r"data.spread = 0\.1 .*, but data.best_of_group draws only",
    ),
    (
        {"data__spread": True, "objective": {"name": "reinforce"}, "sampler__n": 1},
        "sampler.n = 1 makes groups of one response",
    ),
]
SERVERS: list[tuple[Changes, str]] = [
    (server(push="adapter"), r"engine\.push = adapter needs policy\.lora"),
    (server(dialect="sglang", push="transfer"), r"engine\.push = transfer and engine\.dialect = sglang"),
    (server(dialect="sglang", api="generate"), r"engine\.api = generate and engine\.dialect = sglang"),
    (server(url=None), r"engine\.url"),
    (server(api_key="env:AGRO_NOT_SET"), r"engine\.api_key: expected AGRO_NOT_SET"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [*REFERENCES, *PHASES, *GUARDS, *FOLLOWED, *BETAS, *SAMPLES, *SERVERS],
    ids=lambda x: x if isinstance(x, str) else ", ".join(x),
)
def test_settings_that_are_refused(tmp_path: Path, changes: Changes, message: str) -> None:
    with pytest.raises(Refused, match=message):
        Trainer(tiny(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
