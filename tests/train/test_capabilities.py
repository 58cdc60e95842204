"""Engines and sources, of agro and of the user's own: what one doesn't declare is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
from tiny_runs import REWARDS, interrupted, metrics, run_id, run_tiny, samples_of, tiny, weights

import agro
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig, SamplerConfig, SourceConfig
from agro.errors import Refused
from agro.io import plugins
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.rollout import Rollout
from agro.rollout.engines import CAPABILITIES, ENGINES, REQUIREMENTS, Capability, capabilities
from agro.store import Store
from agro.train import around
from agro.train.check import check_config, check_sharded, samples_kl
from agro.train.collate import recording
from agro.train.phases import Phase
from agro.types import Prompt


class Third:
    """An engine that doesn't say that it can do anything but decode."""


@pytest.fixture(params=["server", "third"])
def engine(request, monkeypatch) -> dict[str, str]:
    """[engine] of a server, and of an engine that is added later, in the server's place."""
    if request.param == "third":
        monkeypatch.setitem(ENGINES, "server", frozenset())
    return {"kind": "server", "urls": ["http://127.0.0.1:9"]}


NEEDING: dict[str, Any] = {
    "train__weights_average": 0.9,
    "sampler__keep_sets": True,
    "sampler__skip_layers": 0.5,
    "source__kind": "elsewhere",
    "source__sync_every": 2,
    "source__sync_from": 2,
}


def test_each_requirement_is_tried_here() -> None:
    assert {key.replace("__", ".") for key in NEEDING} == {r.setting for r in REQUIREMENTS}
    assert set(CAPABILITIES) == set(get_args(Capability)) == capabilities("hf")


def test_the_trainer_s_process_can_do_what_collectors_cannot() -> None:
    every = set(around.SOURCE_CAPABILITIES)
    inline, elsewhere = RunConfig(), RunConfig(source=SourceConfig(kind="elsewhere"))
    assert every == set(get_args(around.SourceCapability)) == set(around.SOURCES["inline"]) | {"judges_pairs"}
    assert around.source_abilities(inline) == every - {"judges_pairs"}
    assert {"shares_engine", "samples_current_weights"}.isdisjoint(around.source_abilities(elsewhere))


@pytest.mark.parametrize("key", NEEDING)
def test_a_setting_is_refused_by_an_engine_that_does_not_declare_what_it_needs(
    tmp_path: Path, engine: dict[str, str], key: str
) -> None:
    setting, changes = key.replace("__", "."), {key: NEEDING[key]}
    [need] = [r.needs for r in REQUIREMENTS if r.setting == setting]
    if need in capabilities("server"):
        check_config(tiny(tmp_path, **changes, engine=engine))
        return
    words = re.escape(f'{setting} and engine.kind = "server" exclude each other')
    with pytest.raises(Refused, match=words):
        check_config(tiny(tmp_path, **changes, engine=engine))
    check_config(tiny(tmp_path, engine=engine))
    check_config(tiny(tmp_path, **changes))
    section, name = key.split("__")
    phases = [{"name": "one"}, {"name": "two", section: {name: NEEDING[key]}}]
    if key != "source__kind":  # which is one for the complete run
        with pytest.raises(Refused, match="phase two: " + words):
            check_config(tiny(tmp_path, phases=phases, engine=engine))


def test_what_is_chosen_by_what_the_engine_can(tmp_path: Path, engine: dict[str, str]) -> None:
    check_sharded(tiny(tmp_path, engine=engine))  # all engines serve ranks
    truncated = {"sampler__top_p": 0.8, "objective": {"name": "grpo"}, "engine": engine}
    with pytest.raises(Refused, match=r"top_p 0\.8: .*embedded engine"):
        check_config(tiny(tmp_path, **truncated))
    [run] = Phase.all(tiny(tmp_path, **truncated))
    assert not recording([run], run).sampler.records_kept
    stored = {"data": {"store": "s.db", "replay": 1.0}}
    assert samples_kl(tiny(tmp_path, **stored))
    assert not samples_kl(tiny(tmp_path, **stored, engine=engine))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Encoder:
    return Policy.load(tiny(tmp_path_factory.mktemp("tiny")).policy, seed=0).encoder


@pytest.mark.parametrize("changes", [{"keep_sets": True}, {"skip_layers": 0.5}])
def test_a_rollout_refuses_it_too(encoder: Encoder, changes: dict[str, Any]) -> None:
    [name] = changes
    with pytest.raises(Refused, match=f"sampler.{name} and the engine Third exclude each other"):
        Rollout(encoder, Third()).sample([Prompt("1>")], 1, SamplerConfig(**changes))


def test_no_code_asks_for_the_name_of_an_engine() -> None:
    """Except for the one place that makes it."""
    asking = re.compile(r"""engine\.kind\s*(==|!=|in)|settings\.kind\s*(==|!=|in)""")
    files = Path(agro.__file__).parent.rglob("*.py")
    assert [path.name for path in files if asking.search(path.read_text())] == ["rollout.py"]


ON_POLICY = {"objective": {"name": "agro_onpolicy", "beta": 0.1}}


@pytest.fixture(params=["of agro", "third"])
def other(request, monkeypatch) -> None:
    """What collectors can do, and a source that is added later."""
    if request.param == "third":
        monkeypatch.setitem(around.SOURCES, "elsewhere", frozenset())


def test_a_source_that_declares_nothing_is_refused_where_more_is_needed(tmp_path: Path, other: None) -> None:
    stored = {"store": "s.db", "prompts": "p.jsonl", "replay": 1.0}
    for changes, message in (
        (
            {"data": {**stored, "complete_groups": 2}},
            r'data\.complete_groups = 2 needs a source .*source\.kind = "elsewhere"',
        ),
        (
            {"phases": [{"name": "one"}, {"name": "two", "sampler": {"top_k": 2}}]},
            r'phase two: with source\.kind = "elsewhere" all phases share',
        ),
        ({"data__max_age": 1, **ON_POLICY}, r'with source\.kind = "elsewhere" samples may be stale'),
    ):
        with pytest.raises(Refused, match=message):
            check_config(tiny(tmp_path, **changes, source__kind="elsewhere"))
        check_config(tiny(tmp_path, **changes))
    assert samples_kl(tiny(tmp_path, data=stored))
    assert not samples_kl(tiny(tmp_path, data=stored, source__kind="elsewhere"))


PLUGINS = Path(__file__).parents[2] / "examples/plugins"
ENGINE = f"{PLUGINS}/engine.py:Generate"


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_samples_with_it_and_publishes_weights_to_it(lora: bool, tmp_path: Path) -> None:
    """Of a policy with an adapter it gets merged weights. A resumed run notices that its code has changed."""
    mine = Path(shutil.copy(PLUGINS / "engine.py", tmp_path / "mine.py"))
    changes: dict[str, Any] = {"engine__kind": f"{mine}:Generate", "train__steps": 2}
    if lora:
        new_model(tmp_path / "model", tiny(tmp_path).policy.new, 0)
        changes["policy"] = {"model": str(tmp_path / "model"), "lora": {"rank": 2}}
    run = run_tiny(tmp_path, **changes)
    errors = [row["logp_diff_max"] for row in metrics(run) if row.get("logp_diff_max") is not None]
    assert len(errors) == 2
    assert max(errors) < 1e-4  # nats a token between its log-probs and the trainer's
    assert {sample.version for sample in samples_of(run)} == {0, 1}
    mine.write_text(mine.read_text() + "\nX = 1\n")
    with pytest.raises(Refused, match=r"engine\.kind"):
        run_tiny(tmp_path, resume=True, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__weights_average": 0.9}, r"train\.weights_average"),
        ({"engine__options": {"dtyp": "f"}}, r"engine\.options: .*the options dtyp: .*unexpected keyword"),
    ],
)
def test_what_it_doesn_t_declare_or_take_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_config(tiny(tmp_path, engine__kind=ENGINE, **changes))


WRONG = f"""
from dataclasses import replace
import sys; sys.path.insert(0, {str(PLUGINS)!r})
from engine import Generate

class Wrong(Generate):
"""
SPOILED = {  # fields of each response, and what is said of them
    "{'tokens': done.tokens[:0], 'logp': done.logp[:0]}": "response 0: expected 1 to 3 tokens, got 0",
    "{'logp': done.logp[1:]}": r"expected a log-prob for each of \d tokens, got an array",
    "{'tokens': done.tokens + 99}": r"expected ids from 0 to \d+, got \d+ to \d+",
    "{'logp': 1 - done.logp}": "expected log-probs of at most 0, got",
    "{'tokens': done.tokens.tolist()}": "tokens and log-probs as NumPy arrays, got list and ndarray",
    "{'tokens': 1 / 0}": r"decode: ZeroDivisionError: division by zero \(wrong\.py:9\)",
}


def replacing(fields: str) -> str:
    """The text of a `decode` that changes these of each response."""
    return f"""def decode(self, *given):
        for done in super().decode(*given):
            yield replace(done, **{fields})
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((replacing(fields), f"engine Wrong: .*{message}") for fields, message in SPOILED.items()),
        ("can = {'share_weights'}", r"Wrong: can: .* 'share_weights'; did you mean shares_weights\?$"),
        ("can = []", r"Wrong: can: expected a frozenset of names, got \[\]"),
        ("def load(self, *_): 1 / 0", r"Wrong: load: ZeroDivisionError.*wrong\.py:7"),
        ("def decode(self, waiting, *_): waiting.clear(); yield from ()", r"Wrong answered 0 of \d+"),
        ("def decode(self, *_): yield 3", "engine Wrong: expected a Continuation, got 3"),
        (
            "def __init__(self, *x): super().__init__(*x); del self.measured",
            r"expected the attributes of .*Engine, got none called measured",
        ),
    ],
)
def test_a_wrong_engine_is_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(f"{WRONG}    {line}\n")
    with pytest.raises(Refused, match=message):
        run_tiny(tmp_path, engine__kind=f"{tmp_path}/wrong.py:Wrong")


EXAMPLE = PLUGINS / "curriculum.py"
CURRICULUM = f"{EXAMPLE}:CURRICULUM"
# Random responses are right 5 times in 12, so that some groups of two are.
EASY = {"name": f"{REWARDS}:even"}


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
    rewards: dict[tuple[int, str], list[float]] = defaultdict(list)
    for sample in samples_of(run):  # the version is that of one step, which moves it by one
        rewards[sample.version + 1, sample.prompt_id].append(sample.reward)
    with Store.open(run / "store.db", read_only=True) as store:
        draws = store.draws.drawn(run_id(run))
        trained = {(d.step, s.prompt_id) for d in draws for s in store.samples(ids=[d.sample])}
    rest = {(step + 1, prompt) for (step, prompt), of in rewards.items() if min(of) == 1} & rewards.keys()
    assert len(rewards) == 6 * 5
    assert rest  # by chance the reward of some group is right
    assert trained == rewards.keys() - rest
    interrupted(config, tmp_path / "run", 3)
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
    with pytest.raises(Refused, match=r"source\.around: .* got 'curiculum'; did you mean curriculum\?$"):
        check_config(resting(tmp_path, source__around="curiculum"))


def test_a_package_s_recipes_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.py").write_text("from pathlib import Path\nFOLDER = Path(__file__).parent\n")
    (tmp_path / "grpo.toml").write_text("# Ours.\n[train]\nsteps = 7\n")
    ours = {"recipes": {"mine": f"{tmp_path}/folder.py:FOLDER"}}
    monkeypatch.setattr(plugins, "installed", lambda kind, *_: ours.get(kind, {}))
    with pytest.raises(Refused, match=r"grpo\.toml: a recipe grpo already exists"):
        RunConfig.load("grpo")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source__options": {"rests": 2}},
            r"source\.options of .*: unknown key rests; did you mean rest\?$",
        ),
        ({"source__options": {"rest": 0}}, r"source\.options of .*: rest: input should be .* 1, got 0"),
        ({"source__around": f"{EXAMPLE}:Curriculum"}, r"expected a SourceWrapper .*, got <class"),
        ({"source__around": f"{EXAMPLE}:CURICULUM"}, r"source\.around: .*curriculum\.py has no 'CURICULUM'"),
        ({"source__around": None}, r"source\.options are those of source\.around, which isn't set"),
        ({"data__replay": 1.0, "data__store": "s.db"}, r"CURRICULUM changes fresh samples, but data\.replay"),
        ({"data__spread": True}, r"data\.spread = True needs a source that returns one group .*around"),
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
    with pytest.raises(Refused, match=r"agro_onpolicy needs samples .*source\.around = .*PLAIN"):
        check_config(resting(tmp_path, source=plain, **ON_POLICY))
    check_config(resting(tmp_path, source=here, **ON_POLICY))
    words = r'samples in the trainer\'s process.*, but source\.kind is "elsewhere"'
    with pytest.raises(Refused, match=words):
        check_config(resting(tmp_path, source={**here, "kind": "elsewhere"}))
    check_config(resting(tmp_path, source={**plain, "kind": "elsewhere"}))


SOURCE = """
from agro.train.around import SourceWrapper
from agro.train.source import joined

class Plain:
    def __init__(self, source, context, options):
        self.source = source
    def fill(self, wanted):
        return self.source.fill(wanted)
    def publish(self, learner):
        self.source.publish(learner)

class Wrong(Plain):
    {line}

WRAPPED = SourceWrapper(Wrong{fields})
"""


@pytest.mark.parametrize(
    ("line", "fields", "message"),
    [
        ("fill = None", "", r"WRAPPED: expected a source .*, got <.*Wrong object .* without fill$"),
        ("def fill(self, wanted): pass", "", r"fill: expected a CollectResult .*, got None"),
        ("def fill(self, wanted): return wanted.nothing", "", r"fill: AttributeError: .*\(own\.py:14\)"),
        ("def fill(self, wanted): return joined([self.source.fill(wanted)], (999,))", "", "no .* the id 999"),
        ("def publish(self): pass", "", r"publish: TypeError: .*takes 1 positional argument"),
        ("def publish(self, learner): 1 / 0", "", r"publish: ZeroDivisionError.*\(own\.py:14\)"),
        ("def __init__(self): pass", "", r"was called with \(source, context, options\): TypeError: "),
        ("pass", ", can={'whole_groups'}", r"own\.py can't be imported: .*can: expected a function"),
        (
            "pass",
            ", can=lambda inner: inner",
            r"can was called with \(inner, options\): TypeError: .*takes 1",
        ),
        (
            "pass",
            ", can=lambda inner, options: {'wholegroups'}",
            r"'wholegroups'; did you mean whole_groups\?$",
        ),
        (
            "pass",
            ", needs={'sample_chosen'}",
            r"needs: unknown name 'sample_chosen'; did you mean samples_chosen_prompts\? \(own\.py:16\)$",
        ),
    ],
)
def test_a_wrong_source_is_refused(line: str, fields: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SOURCE.replace("{line}", line).replace("{fields}", fields))
    config = resting(tmp_path, source={"around": f"{tmp_path}/own.py:WRAPPED"}, train__steps=1)
    with pytest.raises(Refused, match=message):
        Trainer(config, tmp_path / "run").run()


def test_a_phase_with_another_source_does_not_inherit_options(tmp_path: Path) -> None:
    other = {"name": "two", "source": {"around": f"{EXAMPLE}:OTHER"}}
    config = resting(tmp_path, phases=[{"name": "one", "source": {"options": {"right": 0.5}}}, other])
    assert config.phase("one").source.options == {"rest": 2, "right": 0.5}
    assert config.phase("two").source.options == {}
