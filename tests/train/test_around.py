"""`source.around`: a source of the user's own around that of the run, and what is refused of one."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import InterruptAfter, metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.io import plugins
from agro.store import Store
from agro.train.check import check_config

EXAMPLE = Path(__file__).parents[2] / "examples/plugins/curriculum.py"
CURRICULUM = f"{EXAMPLE}:CURRICULUM"
# Random responses are right 5 times in 12, so that some groups of two are.
EASY = {"name": f"{Path(__file__).parent / 'reward.py'}:even"}


def resting(folder: Path, **changes: Any) -> RunConfig:
    lines = [json.dumps({"prompt": f"{i}>"}) + "\n" for i in range(5)]
    (folder / "five.jsonl").write_text("".join(lines))
    values = {
        "data": {"prompts": str(folder / "five.jsonl")},
        "sampler": {"n": 2, "max_new": 1},
        "reward": EASY,
        "source": {"around": CURRICULUM, "options": {"rest": 2}},
        "train": {"steps": 6, "groups": 5, "lr": 1e-2, "micro_batch": 16, "checkpoint_every": 2},
    }
    return tiny(folder, **{**values, **changes})


def test_a_source_of_a_user_changes_what_is_trained_on_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(EXAMPLE.read_text())
    config = resting(tmp_path, source__around=f"{own}:CURRICULUM")
    run = Trainer(config, tmp_path / "whole").run()
    name = json.loads((run / "config.json").read_text())["run"]
    rewards: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Store.open(run / "store.db", read_only=True) as store:
        for sample in store.samples():  # the version is that of one step, which moves it by one
            rewards[sample.version + 1][sample.prompt_id].append(sample.reward)
        trained = {
            (d.step, s.prompt_id) for d in store.draws.drawn(name) for s in store.samples(ids=[d.sample])
        }
    solved = {(step, p) for step, groups in rewards.items() for p, of in groups.items() if min(of) == 1}
    every = {(step, prompt) for step, groups in rewards.items() for prompt in groups}
    rest = {(step + 1, prompt) for step, prompt in solved} & every
    assert len(every) == 6 * 5
    assert rest  # by chance the reward of some group is right
    assert trained == every - rest
    with pytest.raises(Interrupted):
        Trainer(config, tmp_path / "run", monitors=[InterruptAfter(3)]).run()
    resumed = Trainer(config, tmp_path / "run", resume=True).run()
    assert weights(resumed) == weights(run)
    assert [row["groups"] for row in metrics(resumed)] == [row["groups"] for row in metrics(run)]
    other = resting(tmp_path, source__around=f"{own}:CURRICULUM", source__options={"rest": 3})
    with pytest.raises(Refused, match=r"source\.options\.rest was 2, now it is 3"):
        Trainer(other, tmp_path / "run", resume=True).run()
    own.write_text(EXAMPLE.read_text() + "CURRICULUM = CURRICULUM\n")
    with pytest.raises(Refused, match=r"source\.around"):
        Trainer(config, tmp_path / "run", resume=True).run()


def test_an_installed_source_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "installed", lambda kind, *_: {"curriculum": CURRICULUM})
    check_config(resting(tmp_path, source__around="curriculum"))
    with pytest.raises(Refused, match=r"source\.around: .* got 'curiculum'; did you mean curriculum\?"):
        check_config(resting(tmp_path, source__around="curiculum"))


def test_a_package_s_recipes_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.py").write_text("from pathlib import Path\nFOLDER = Path(__file__).parent\n")
    (tmp_path / "curriculum.toml").write_text(
        "# Easy ones rest.\n#   agro train curriculum\n[train]\nsteps = 7\n"
    )
    ours = {"recipes": {"mine": f"{tmp_path}/folder.py:FOLDER"}}
    monkeypatch.setattr(plugins, "installed", lambda kind, *_: ours.get(kind, {}))
    assert RunConfig.load("curriculum").train.steps == 7
    (tmp_path / "curriculum.toml").rename(tmp_path / "grpo.toml")
    with pytest.raises(Refused, match=r"grpo\.toml: there is a recipe grpo"):
        RunConfig.load("grpo")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source__options": {"rests": 2}}, r"source\.options of .*: unknown key rests; did you mean rest\?"),
        ({"source__options": {"rest": 0}}, r"source\.options of .*: rest: input should be .* 1, got 0"),
        ({"source__around": f"{EXAMPLE}:Curriculum"}, r"expected a SourceWrapper .*, got <class"),
        ({"source__around": f"{EXAMPLE}:CURICULUM"}, r"source\.around: .*curriculum\.py has no 'CURICULUM'"),
        ({"source__around": None}, r"source\.options are those of source\.around, which isn't set"),
        ({"data__replay": 1.0, "data__store": "s.db"}, r"CURRICULUM changes fresh samples, but data\.replay"),
        (
            {"data__spread": True},
            r"data\.spread = True needs a source that returns one group for each .*around",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_config(resting(tmp_path, **changes))


def test_one_that_says_nothing_can_do_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from agro.train.around import SourceWrapper\n"
        "PLAIN = SourceWrapper(lambda source, context, options: source)\n"
        "HERE = SourceWrapper(lambda source, context, options: source, needs=frozenset({'shares_engine'}),\n"
        "    can=lambda inner, options: inner)\n"
    )
    plain, here = ({"around": f"{tmp_path}/own.py:{name}"} for name in ("PLAIN", "HERE"))
    check_config(resting(tmp_path, source=plain))
    on_policy = {"objective": {"name": "agro_onpolicy", "beta": 0.1}}
    with pytest.raises(Refused, match=r"agro_onpolicy needs samples .*source\.around = .*PLAIN"):
        check_config(resting(tmp_path, source=plain, **on_policy))
    check_config(resting(tmp_path, source=here, **on_policy))
    with pytest.raises(
        Refused, match=r'samples in the trainer\'s process.*, but source\.kind is "elsewhere"'
    ):
        check_config(resting(tmp_path, source={**here, "kind": "elsewhere"}))
    check_config(resting(tmp_path, source={**plain, "kind": "elsewhere"}))


def test_a_phase_with_another_source_does_not_inherit_options(tmp_path: Path) -> None:
    other = {"name": "two", "source": {"around": f"{EXAMPLE}:OTHER"}}
    config = resting(tmp_path, phases=[{"name": "one", "source": {"options": {"right": 0.5}}}, other])
    assert config.phase("one").source.options == {"rest": 2, "right": 0.5}
    assert config.phase("two").source.options == {}


def test_what_was_a_section_is_refused_with_the_way_out_and_a_run_without_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r'source\.props: it is source\.around = "props" now, with its values'):
        tiny(tmp_path, source__props={"lr": 1e-3})
    record = tiny(tmp_path).record()
    record["source"] |= {"props": None}
    record["sampler"] |= {"draft_every": None, "draft_lr": 1e-3}
    record["place"] |= {"address": None, "port": 0}
    assert RunConfig.of_record(record, "config.json") == tiny(tmp_path)
    record["place"]["address"] = "10.0.0.1"
    with pytest.raises(Refused, match=r'place\.address: it is data\.store = "postgresql://…" now$'):
        RunConfig.of_record(record, "config.json")
    record["place"]["address"] = None
    record["sampler"]["draft_every"] = 2
    with pytest.raises(Refused, match=r'sampler\.draft_every: it is source\.around = "trained_draft" now'):
        RunConfig.of_record(record, "config.json")
