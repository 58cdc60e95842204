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
TARGET_KL: Changes = EACH | {"evaluate__target_kl": 1.0}
EMA: Changes = {"policy__reference": "ema", "policy__reference_decay": 0.9}
LOG: Changes = {"data__replay": 1.0}
RLOO: Changes = {"objective": {"name": "rloo", "beta": 0.0}}
RATIOS: Changes = {"sampler__top_p": 0.8, "objective": {"name": "grpo"}}
ON_A_LOG: Changes = {"data__replay": 1.0, "data__store": "log.db"}
TUNED: Changes = {"objective__beta": {"start": 0.02, "target_kl": 0.3, "rate": 0.2}}
ON_POLICY: Changes = {"objective": {"name": "agro_onpolicy", "beta": 0.1}}


DPO: Changes = {"objective": {"name": "dpo", "beta": 0.1}}
SFT: Changes = {"objective": {"name": "sft"}}
REINFORCE: Changes = {"objective": {"name": "reinforce"}}
EXACT = {"name": "exact"}
COMPLETED: Changes = {
    "data": {"store": "log.db", "prompts": "p.jsonl", "replay": 1.0, "complete_groups": 2},
    "reward": EXACT,
}
PARTS: Changes = {"reward": {"functions": [EXACT, {"name": "overlong", "options": {"max_tokens": 3}}]}}
GDPO: Changes = PARTS | {"objective": {"name": "gdpo"}}
STORED: Changes = {"objective": {"name": "reinforce", "baseline": "stored"}}
TRACKED: Changes = STORED | {"sampler__n": 1, "data__value_half_life": 3.0}
UNCERTAIN: Changes = TRACKED | {"data__prompt_order": "uncertain"}
RIVALS: Changes = {
    "objective": {"name": "seppo", "beta": 0.1},
    "data": {"prompts": "p.jsonl", "store": "experts.db", "experts": 1},
    "source": {"around": "rivals", "sync_every": 2, "sync_from": 3},
    "policy__reference": "sampler",
}
TEACHER: Changes = {
    "objective": {"name": "distill"},
    "policy__reference": "model",
    "policy__reference_model": "http://127.0.0.1:1",
    "evaluate__kl": False,
}


def server(**engine: Any) -> Changes:
    return {"engine": {"kind": "server", "urls": ["http://127.0.0.1:9"], **engine}}


def phases(*changes: Changes) -> Changes:
    return {"phases": [{"name": name, **each} for name, each in zip("abc", changes)]}


def beta(**values: Any) -> Changes:
    return {"objective": {"name": "agro", "beta": values}}


REFERENCES: list[tuple[Changes, str]] = [
    ({"policy__reference": "ema"}, r'policy\.reference_decay and policy\.reference = "ema" go together'),
    ({"policy__reference_every": 3}, r'reference_every and policy\.reference = "periodic" go together'),
    (EMA | {"policy__dtype": "bfloat16"}, r'policy\.reference = "ema" .* policy\.dtype = "bfloat16"'),
    ({"policy__lora": {}}, r"\[policy\.lora\] adapts a trained model, but policy\.new"),
    ({"policy__reference": "phase"} | phases({}, {"policy": {"reference": "start"}}), r"a: phase, b: start"),
]
PHASES: list[tuple[Changes, str]] = [
    (phases({"train": {"start": "first"}}), r'train\.start = "first" is for later phases'),
    (phases({"policy": {"temperature": 2.0}}, {}), r"phase a: a phase can't change policy\.temperature"),
    (phases({"policy": {"temperature": 2.0}}), r"a phase can't change policy\.temperature"),
    (phases({"reward": {"name": "exact"}}, {}), r"phase a: a phase can't change reward\.name"),
    (phases({"data": {"prompts": "other.jsonl"}}), r"phase a: a phase can't change data\.prompts"),
    (phases({"train": {"push": "me/it"}}), r"phase a: a phase can't change train\.push"),
    (phases({"guard": {"kl": 1.0, "action": "skip"}}), r'phase a: guard\.kl and guard\.action = "skip"'),
]
GUARDS: list[tuple[Changes, str]] = [
    ({"guard": {"kl": 1.0, "action": "skip"}}, r'guard\.kl and guard\.action = "skip"'),
    (RLOO | {"guard": {"kl": 1.0}}, r"guard\.kl: .* would watch nothing"),
]
FOLLOWED: list[tuple[Changes, str]] = [
    ({"evaluate__patience": 2}, r"evaluate\.patience = 2 .* data\.eval_prompts"),
    (EACH | {"evaluate__patience": 2}, r"evaluate\.patience = 2 .* data\.eval_prompts .*data\.hold_out"),
    (EACH | {"evaluate__keep_best": True}, r"evaluate\.keep_best = True .* no phase has that"),
    (TARGET_KL, r"evaluate\.target_kl = 1.0 .* which no phase measures"),
    (TARGET_KL | HELD | {"evaluate__kl": False}, r"evaluate\.target_kl = 1.0 .* which no phase measures"),
    (TARGET_KL | HELD | {"evaluate__every": 0}, r"evaluate\.target_kl = 1.0 acts at evaluations"),
    (EACH | {"evaluate__target_kl": 0.0}, r"evaluate\.target_kl"),
]
BETAS: list[tuple[Changes, str]] = [
    ({"objective__beta": {"start": 0.1, "target_kl": 0.0, "rate": 0.1}}, "numbers above 0"),
    ({"objective__beta": {"target_kl": 1.0, "rate": 0.1}}, "expected {start, target_kl, rate}"),
    (TUNED | LOG | {"evaluate__kl_samples": 0}, "follows kl_ref"),
    (TUNED | LOG | {"evaluate__every": 0}, "follows kl_ref"),
    (
        TUNED | ON_A_LOG | EACH | {"evaluate__temperature": 0.0},
        r"evaluate\.temperature = policy\.temperature",
    ),
    ({"objective": {"name": "kl_pg", "beta": TUNED["objective__beta"]}}, "follows kl_ref"),
    (beta(start=1.0), "schedule of an option"),
]
SAMPLES: list[tuple[Changes, str]] = [
    (ON_POLICY | {"train__updates": 2}, r"agro_onpolicy needs .*staleness 0.* train\.updates = 2"),
    (ON_POLICY | {"source__sync_every": 2}, r"source\.sync_every = 2 samples are stale \(with 1 they"),
    (
        ON_A_LOG | {"objective": {"name": "grpo", "ratio": "old"}},
        r"old_logp \(the trainer's log-probs when its samples were generated\), but data\.replay = 1",
    ),
    (RATIOS | {"sampler__keep_sets": False}, r"top_p 0\.8: .*embedded engine, sampler\.keep_sets = true"),
    (RATIOS | {"sampler__temperature": 0.0}, r"temperature 0, top_p 0\.8: .*without greedy choices"),
    ({"data__spread": True} | DPO | LOG, r"data\.spread = true .*, but objective dpo draws judged pairs"),
    (SFT | {"data__spread": 0.1, "data__best_of_group": True}, r"data\.spread = 0\.1 .*, but data.best_of_"),
    (REINFORCE | {"data__spread": True, "sampler__n": 1}, "sampler.n = 1 makes groups of one response"),
]
SERVERS: list[tuple[Changes, str]] = [
    (server(push="adapter"), r"engine\.push = adapter needs policy\.lora"),
    (server(dialect="sglang", push="transfer"), r"engine\.push = transfer and engine\.dialect = sglang"),
    (server(dialect="sglang", api="generate"), r"engine\.api = generate and engine\.dialect = sglang"),
    (server(urls=[]), r"engine\.urls"),
    (server(api_key="env:AGRO_NOT_SET"), r"engine\.api_key: expected AGRO_NOT_SET"),
]


NO_SHARE = r"data\.replay: expected (a share from 0 to 1|shares that add up)"
DRAWS: list[tuple[Changes, str]] = [
    *(
        ({"data__replay": replay}, NO_SHARE)
        for replay in (1.5, -0.1, True, "half", {"a": "b"}, {"a": 0.6, "b": 0.6})
    ),
    ({"data__replay": {"start": 2.0, "end": 0.0, "steps": 3}}, NO_SHARE),
    (
        {"data__replay": {"policy": 0.5}, "data__roles": ["log"]},
        r"data\.replay has a share of policy, which data\.roles doesn't name",
    ),
    (
        {"data__replay": {"a": 0.5, "b": 0.25}, "data__sources": ["a"]},
        r"data\.replay has a share of b, which data\.sources doesn't name",
    ),
    (COMPLETED | {"data__replay": 0.0}, "completes stored groups, but none is drawn"),
    (COMPLETED | {"data__spread": True}, "data.spread exclude each other"),
    (COMPLETED | DPO, "objective dpo needs pairs"),
    ({"data": {"replay": 1.0, "hold_out": 0.1}}, r"data\.hold_out holds out prompts of"),
    (ON_A_LOG | {"data__eval_store": "held.db", "data__hold_out": 0.1}, r"data\.hold_out holds out prompts"),
    ({"data__experts": 1}, r"data\.experts = 1 draws stored responses, but data\.store isn't set"),
    ({"data__reward_scale": {"a": {"factor": 2}}, "data__spread": True}, r"after the draw, but data\.spread"),
    (UNCERTAIN | {"data__value_half_life": None}, r'by tracked values: .* got None, 4 and "inline"'),
    (UNCERTAIN | {"data__candidates": 1}, r'by tracked values: .* got 3\.0, 1 and "inline"'),
    (UNCERTAIN | {"source__kind": "elsewhere"}, r'by tracked values: .* got 3\.0, 4 and "elsewhere"'),
    (STORED, r'data\.value_store, or .*baseline = "stored", go together'),
    ({"data__value_store": "values.db"}, r'data\.value_store, or .*baseline = "stored", go together'),
    ({"data": {}}, r"data\.prompts isn't set"),
]
REWARDS: list[tuple[Changes, str]] = [
    (GDPO | {"reward__whiten": "group"}, r"the advantage of gdpo .*reward\.whiten would be lost"),
    (GDPO | {"reward__clip": [-1, 1]}, r"the advantage of gdpo .*reward\.clip would be lost"),
    ({"objective": {"name": "gdpo"}}, r"several rewards, but reward\.functions names none"),
    (TRACKED | {"reward__clip": [-1, 1]}, r"reward\.clip: stored values"),
    (
        PARTS | {"reward__whiten": "batch", "data__reward_scale": {"old": {}}},
        r"data\.reward_scale would be lost",
    ),
]
OBJECTIVES: list[tuple[Changes, str]] = [
    ({"objective": {"name": "agro"}}, "no default"),
    ({"objective": {"name": "agro", "betta": 1}}, r"unknown option betta; did you mean beta\?$"),
    ({"objective": {"name": "agor", "beta": 1.0}}, "expected one of `agro objectives`"),
    ({"sampler__n": 1}, r"sampler\.n is 1\. What to do: a larger sampler\.n"),
    (
        REINFORCE | {"sampler__n": 1, "objective__baseline": "mean"},
        r"remove objective\.baseline = 'mean' or give it another value, or a larger sampler\.n",
    ),
    (
        ON_POLICY | {"sampler__n": 2, "objective__baseline": True},
        r"groups of at least 3 responses, but sampler\.n is 2",
    ),
    (ON_POLICY | {"sampler__temperature": 0.5}, "and no skipped layers; got temperature 0.5"),
    (
        ON_POLICY | {"sampler__skip_layers": 0.5},
        r"no skipped layers; got temperature 1\.0, .* skip_layers 0\.5",
    ),
    (DPO | ON_A_LOG | {"data__group_size": 1}, r"at least 2 responses, but data\.group_size is 1"),
    *(
        (
            DPO | {"data__replay": replay},
            rf"needs pairs .*, but data\.replay = {replay} samples responses without judgments \(1 draws",
        )
        for replay in (0.0, 0.5)
    ),
    (
        {"objective__baseline": "step", "train__groups": 1},
        r'objective\.baseline = "step" .* train\.groups is 1',
    ),
    ({"evaluate__beta": 0.0}, "greater than 0"),
    *(({"train__weights_average": share}, r"train\.weights_average") for share in (0.0, 1.0)),
]
OTHER_POLICIES: list[tuple[Changes, str]] = [
    ({"policy__model": "somewhere"}, "got both"),
    (RIVALS | {"source__sync_every": 1, "source__sync_from": 1}, r'reference = "sampler" uses the earlier'),
    (RIVALS | {"source__kind": "elsewhere"}, r"source\.sync_from = 3 and source\.kind"),
    (RIVALS | {"objective": {"name": "agro", "beta": 0.1}}, r"rivals makes pairs .* objective agro"),
    (RIVALS | {"data__experts": 0}, r"rivals makes pairs .* data\.experts = 0"),
    (RIVALS | {"policy__cache_reference": True}, r"\"sampler\" changes .* policy\.cache_reference"),
    (TEACHER | {"policy__cache_reference": True}, r"reference_model is a URL, .* no policy\.cache_reference"),
    (TEACHER | {"policy__temperature": 0.5}, r"policy\.temperature = 1, got 0\.5"),
    (
        {"engine__kind": "vlm"},
        r"engine\.kind: expected hf, vllm, .*module:NAME .*; did you mean vllm\?, got 'vlm'",
    ),
    ({"engine__kind": "json:dumps"}, r"a class like agro\.rollout\.engines\.Engine, .* without decode, load"),
    ({"engine__kind": "none.py:X"}, r"engine\.kind: there is no file .*none\.py"),
    (
        {"environment": {"name": "some.py:Environment"}, "data": {"store": "log.db", "replay": 1.0}},
        "environment: .* data.prompts or data.eval_prompts, and neither is set",
    ),
    ({"track": {"to": ["mlflow"]}}, r"track\.to"),
    *(({"train__push": name}, r"train\.push") for name in ("fine", "a/b/c", "someone/fi ne")),
    (phases({"track": {"to": ["wandb"]}}), "phase a: track: a phase can't set it"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(*REFERENCES, *PHASES, *GUARDS, *FOLLOWED, *BETAS, *SAMPLES, *SERVERS),
        *(*DRAWS, *REWARDS, *OBJECTIVES, *OTHER_POLICIES),
    ],
    ids=lambda x: x if isinstance(x, str) else ", ".join(x),
)
def test_settings_that_are_refused(tmp_path: Path, changes: Changes, message: str) -> None:
    with pytest.raises(Refused, match=message):
        Trainer(tiny(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_that_are_accepted(tmp_path: Path) -> None:
    """Patience of all phases, evaluations of one."""
    patient = HELD | {"evaluate__patience": 2} | phases({}, {"evaluate": {"every": 2}})
    trainer = Trainer(tiny(tmp_path, **patient), tmp_path / "run")
    assert [(p.config.evaluate.patience, p.config.evaluate.every) for p in trainer.phases] == [(2, 0), (2, 2)]
