"""A dry run says what the run then does, and writes nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import fill_store, metrics, tiny, write_prompts

from agro.api.plan import Row, _pass, describe, positions, within
from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.models.footprint import SPARE, Footprint, optimized, saved_for_backward
from agro.models.policy import Policy
from agro.store import Store, is_held_out
from agro.train.phases import Phase
from agro.types import Sample

CALCULATOR = f"{Path(__file__).parents[2]}/examples/environments/calculator.py:Calculator"


def test_counts_are_those_of_the_run(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db", groups=8, size=4)
    phases = [
        {"name": "mixed", "data": {"replay": 0.5}},
        {"name": "alone", "data": {"replay": 1.0}, "train": {"steps": 2}},
    ]
    config = tiny(
        tmp_path,
        phases=phases,
        data__store=str(tmp_path / "log.db"),
        data__group_size=3,
        evaluate__every=2,
        evaluate__n=2,
        data__eval_prompts=write_prompts(tmp_path / "held.jsonl", range(60, 66)),
        data__sources=["someone"],
    )
    found = Trainer(config, tmp_path / "run").plan()
    assert not (tmp_path / "run").exists()
    rows = metrics(Trainer(config, tmp_path / "run").run())
    for phase in found["phases"]:
        mine = [m for m in rows if m["phase"] == phase["phase"]]
        steps = [m for m in mine if m["step"]]
        assert phase["steps"] == len(steps)
        assert phase["fresh_groups"] == sum(round(m["groups"] * (1 - m["replay_share"])) for m in steps)
        assert phase["responses_trained"] == sum(m["groups"] * 3 for m in steps)
        assert phase["tokens_sampled_at_most"] >= sum(m["sampled_tokens"] for m in steps)
        assert phase["responses_evaluated"] == sum(m["eval_n"] or 0 for m in mine)
        assert phase["evaluations"] == sum(m["eval_n"] is not None for m in mine)
    assert found["phases"][1]["responses_sampled"] == 0
    assert "alone: agro, 2 steps, 2 updates" in describe(found)


@pytest.mark.parametrize(("every", "kl_samples"), [(0, 5), (2, 3), (3, 0)])
def test_unscored_responses_on_a_log_are_counted(tmp_path: Path, every: int, kl_samples: int) -> None:
    """Four steps: the start, the last one, and each that is a multiple of `every`."""
    fill_store(tmp_path / "log.db")
    log = {"store": str(tmp_path / "log.db"), "replay": 1.0}
    rule = {"every": every, "kl_samples": kl_samples, "side_by_side": 2}
    config = tiny(tmp_path, data=log, train__steps=4, evaluate=rule)
    [phase] = Trainer(config, tmp_path / "run").plan()["phases"]
    run = Trainer(config, tmp_path / "run").run()
    _, *lines = (run / "held_out.jsonl").read_text().splitlines()  # after the log's best
    assert phase["evaluations"] == len(lines) == (3 if every else 2)
    assert phase["responses_evaluated"] == len(lines) * max(kl_samples, 2)


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("mixed", 4)])
def test_the_peak_has_what_training_keeps_of_each_weight(tmp_path: Path, dtype: str, itemsize: int) -> None:
    """Two moments in its type, or in 8 bits, and an average in float32. A server is another process."""
    trainer = Trainer(tiny(tmp_path, policy__dtype=dtype), tmp_path / "run")
    [phase] = Phase.all(trainer.config)
    with trainer.loaded() as machine:
        machine.measure([phase])
        step, rates = machine.step(phase), machine.rates[phase.name]

        def peak(**changes: Any) -> int | None:
            return machine.peak(tiny(tmp_path, policy__dtype=dtype, **changes), step, rates)

        weights = list(machine.policy.trained().values())
        assert {w.itemsize for w in weights} == {itemsize}
        plain, trained = peak(), sum(w.numel() for w in weights)
        moments = plain - peak(train__optimizer="adamw_8bit")
        assert moments == pytest.approx(SPARE * 2 * (itemsize - 1) * trained, abs=1)
        assert peak(train__weights_average=0.9) - plain == pytest.approx(SPARE * 4 * trained, abs=1)
        without_sampling = machine.peak(trainer.config, step._replace(fresh=[]), rates)
        for sleep in (False, True):
            assert peak(engine={"kind": "vllm", "sleep": sleep}) == without_sampling
        assert without_sampling < plain
        machine.loaded = None
        assert peak() is None


def test_the_peak_is_of_what_is_loaded_and_of_copies_that_sample(tmp_path: Path, monkeypatch) -> None:
    found: list[Footprint] = []
    monkeypatch.setattr(Footprint, "peak", lambda of, *given: found.append(of) or 0.0)
    model = {"policy__new__layers": 2, "engine__fused": False}
    trainer = Trainer(tiny(tmp_path, **model), tmp_path / "run")
    lagging = tiny(tmp_path, **model, source__sync_every=2)
    with trainer.loaded() as machine:
        [phase] = Phase.all(trainer.config)
        machine.measure([phase])
        step, rates = machine.step(phase), machine.rates[phase.name]
        for config in (trainer.config, lagging):
            machine.peak(config, step, rates)
    size = sum(w.nbytes for w in machine.policy.trained().values())
    plain, lags = found
    assert plain.resting == machine.loaded + optimized(trainer.config.train, size // 4, size)
    assert lags.resting - plain.resting == size
    assert (plain.on_cpu, plain.server, plain.saved) == (True, None, rates.saved / 2)


def test_layers_that_are_computed_again_take_another_forward_pass(tmp_path: Path) -> None:
    trainer = Trainer(tiny(tmp_path, train__updates=2), tmp_path / "run")
    again = tiny(tmp_path, train__updates=2, train__gradient_checkpointing=True)
    [phase], [other] = Phase.all(trainer.config), Phase.all(again)
    with trainer.loaded() as machine:
        machine.measure([phase])
        step, rates = machine.step(phase), machine.rates[phase.name]
        without, with_it = (machine.seconds(p, step, rates)["training"] for p in (phase, other))
        tokens = sum(positions(machine.policy, rows) for rows in step.passes)
    assert with_it == pytest.approx(without + 2 * tokens * rates.scoring)


def test_the_step_is_predicted_as_far_as_it_is_known(tmp_path: Path) -> None:
    """What a server or an environment takes isn't known here; the other parts are."""
    changes: dict[str, dict[str, Any]] = {
        "": {},
        "a server samples": {"engine": {"kind": "server", "urls": ["http://localhost:1"], "model": "m"}},
        "an environment takes its own time": {"environment": {"name": CALCULATOR}},
    }
    for reason, change in changes.items():
        config = tiny(tmp_path, policy__new__context=64, **change)
        found = Trainer(config, tmp_path / "run").plan()
        [phase] = found["phases"]
        parts = phase["step_seconds"]
        assert phase["step_unknown"] == reason
        assert (parts["sampling"] is None) == bool(reason)
        said = describe(found)
        assert said.count("unknown: ") == said.count(f"unknown: sampling ({reason})") == bool(reason)
        assert min(parts[name] for name in ("reference", "training")) > 0
        if phase["peak"] is not None:  # model, gradients and reference, and two moments of each weight
            assert phase["peak"] > 5 * 4 * found["parameters"]


def test_what_a_pass_keeps_is_counted_without_the_weights() -> None:
    """y = (x W)²: x [5,4] for the gradient of W, and x W [5,3] for that of the square, in float32."""
    linear = torch.nn.Linear(4, 3, bias=False)
    with saved_for_backward(linear) as kept:
        (linear(torch.ones(5, 4)) ** 2).sum()
    assert sum(kept.values()) == 4 * (5 * 4 + 5 * 3)


def test_it_refuses_what_the_run_would(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"doesn't exist"):
        Trainer(tiny(tmp_path, data__replay=1.0), tmp_path / "run").plan()
    with pytest.raises(Refused, match=r"none\.db"):
        Trainer(tiny(tmp_path, data__eval_store=str(tmp_path / "none.db")), tmp_path / "run").plan()


def test_it_refuses_an_id_that_is_another_prompt_in_the_store(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db", groups=8, size=4)
    with Store.open(tmp_path / "log.db") as store:
        store.append([Sample("another question", "1", reward=1.0, prompt_id="7")])
    (tmp_path / "asked.jsonl").write_text('{"prompt": "000>", "answer": "0", "prompt_id": "7"}\n')
    asked = {"store": str(tmp_path / "log.db"), "prompts": str(tmp_path / "asked.jsonl"), "replay": 0.5}
    with pytest.raises(Refused, match=r"prompt_id.*7"):
        Trainer(tiny(tmp_path, data=asked), tmp_path / "run").plan()


def test_turns_of_an_environment_are_counted(tmp_path: Path) -> None:
    """Prompts of 5 tokens (BOS, "000>"), 4 turns of 3 tokens."""
    turns = {"name": CALCULATOR, "max_turns": 4}
    one, four = (
        Trainer(tiny(tmp_path, policy__new__context=64, environment=e), tmp_path / "run").plan()["phases"][0]
        for e in (None, turns)
    )
    assert (one["longest_sequence"], four["longest_sequence"]) == (8, 17)
    assert four["tokens_sampled_at_most"] == 4 * one["tokens_sampled_at_most"]


def test_measuring_a_slow_step_takes_seconds_and_says_so(tmp_path: Path, capsys) -> None:
    """A step of 64 responses with 2,000 tokens takes minutes; its times are those of parts of it."""
    new = {"alphabet": "0123456789>", "hidden": 128, "layers": 4, "heads": 4, "context": 2048}
    config = tiny(tmp_path, policy__new=new, sampler={"n": 4, "max_new": 2000}, train__groups=16)
    began, cpu = time.perf_counter(), time.process_time()
    found = Trainer(config, tmp_path / "run").plan()
    assert min(time.perf_counter() - began, time.process_time() - cpu) < 20
    assert found["seconds_at_most"] > 20
    assert "loading, checking and measuring" in capsys.readouterr().err
    measured = found["measured"]
    assert 0 < measured["cpu_seconds"] <= measured["seconds"] * measured["threads"] * 1.1
    assert "s of CPU time, on " in describe(found)


def test_a_part_of_a_pass_is_timed_where_it_takes_too_long() -> None:
    rows = [Row(100, 100, 0)] * 10
    assert len(within(rows, 700)) == 3
    [part] = within(rows, 60)
    assert (part.length, part.learned) == (60, 59)


def test_a_prompt_of_a_group_is_counted_once_where_passes_share_it(tmp_path: Path) -> None:
    """Two groups of three responses: 100 tokens of prompt, 100 of response each."""
    policy = Policy.load(tiny(tmp_path).policy, seed=0)
    rows = [Row(100, 100, group) for group in (0, 0, 0, 1, 1, 1)]
    for packs, count in ((True, 2 * 100 + 6 * 100), (False, 6 * 200)):
        policy.packs = packs
        assert positions(policy, rows) == count


def test_a_store_that_the_run_will_fill_counts_as_full(tmp_path: Path) -> None:
    """Half of 4 groups come from it: a step is trained on as many responses as one of fresh samples alone."""
    for replay in (0.0, 0.5):
        trainer = Trainer(tiny(tmp_path, data__replay=replay), tmp_path / "run")
        with trainer.loaded() as machine:
            step = machine.step(Phase.all(trainer.config)[0])
        assert len(step.fresh) == 12 * (1 - replay)
        assert sum(positions(machine.policy, rows) for rows in step.passes) == 4 * 5 + 12 * 3


def test_held_out_groups_of_a_store_are_not_counted(tmp_path: Path) -> None:
    """Prompts that are held out have 5 responses of 4 letters, the others 2 of 1 letter, of which all are
    drawn. These have 7 tokens: a BOS, 4 of the prompt, 1 and an EOS."""
    with Store.open(tmp_path / "log.db") as store:
        for i in range(40):
            size, text = (5, "1111") if is_held_out(str(i), 0.5) else (2, "1")
            store.append(Sample(f"{i:03}>", text, reward=1.0, prompt_id=str(i)) for _ in range(size))
    data = {"store": str(tmp_path / "log.db"), "replay": 1.0, "hold_out": 0.5, "near_copies": 1.0}
    trainer = Trainer(tiny(tmp_path, data=data), tmp_path / "run")
    with trainer.loaded() as machine:
        step = machine.step(Phase.all(trainer.config)[0])
    assert step.stored_size == 2
    assert {row.length for rows in step.passes for row in rows} == {7}


def test_what_a_pass_saves_is_counted_by_what_it_computes(tmp_path: Path) -> None:
    """Two prompts of 5 tokens have 8 responses of 3 each: 58 tokens are computed where 128 stand."""
    trainer = Trainer(
        tiny(tmp_path, sampler__n=8, train__groups=2, train__micro_batch=None), tmp_path / "run"
    )
    with trainer.loaded() as machine:
        phase = Phase.all(trainer.config)[0]
        machine.measure([phase])
        rates, [rows] = machine.rates[phase.name], machine.step(phase).passes
        computed: list[int] = []
        embedding = machine.policy.model.get_input_embeddings()
        embedding.register_forward_hook(lambda layer, inputs, output: computed.append(inputs[0].numel()))
        with saved_for_backward(machine.policy.model) as saved:
            _pass(machine.policy, ("logp",), None, rows)
    assert positions(machine.policy, rows) == 58
    assert computed == [pytest.approx(58, rel=0.15)]  # random responses may begin alike
    assert rates.saved * positions(machine.policy, rows) == pytest.approx(sum(saved.values()), rel=0.05)


def test_other_programs_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("agro.api.plan.load_average", lambda: 3.0)
    found = Trainer(tiny(tmp_path), tmp_path / "run").plan()
    found["measured"] |= {"threads": 1, "cores": 2}
    assert "other programs use the cores (load average 3.0" in describe(found)
    for load in (0.9, None):
        found["measured"]["load_before"] = load
        assert "other programs" not in describe(found)


def test_the_plan_says_how_many_groups_a_step_trains_on(tmp_path: Path) -> None:
    """Half of 4 groups are drawn; a prompt that is sampled too is one group with what is drawn."""
    few = write_prompts(tmp_path / "few.jsonl", range(4))
    config = tiny(tmp_path, data={"prompts": few, "replay": 0.5})
    found = Trainer(config, tmp_path / "run").plan()
    assert (
        "6 updates, 2 to 4 groups per step: a prompt that is both sampled and drawn is one group"
        in describe(found)
    )
    Trainer(config, tmp_path / "run").run()
    groups = {row["groups"] for row in metrics(tmp_path / "run") if row["step"]}
    assert min(groups) >= found["phases"][0]["groups_per_step_at_least"] == 2
    assert min(groups) < 4
    assert "groups per step" not in describe(Trainer(tiny(tmp_path), tmp_path / "other").plan())
