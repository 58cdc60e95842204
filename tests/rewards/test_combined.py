"""Several rewards as one, from the configuration to the store and the metrics."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from agro.config import RewardPart, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.rewards import Score, load_reward
from agro.rewards.shaping import CombinedReward
from agro.rollout import CollectResult, Task, collect
from agro.store import Store
from agro.train.feed import Valid
from agro.train.measure import describe_batch
from agro.types import Prompt, Sample


def settings(*functions, **others):
    return RunConfig.of({"reward": {"functions": list(functions), **others}}).reward


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(completions, unit=1.0, **columns): return [len(c) / unit for c in completions]\n"
        "def number(completions, **columns): return [float(c) for c in completions]\n"
    )
    return path


@pytest.mark.test
def test_the_sum_and_its_parts(functions):
    """exact is 1 for the first response only; 0.5 · length/2 is 0.5 and 0.75.

    number has no weight, so it may fail.
    """
    reward = load_reward(
        settings(
            {"name": "exact"},
            {"name": f"{functions}:length", "weight": 0.5, "options": {"unit": 2}, "label": "length"},
            {"name": f"{functions}:number", "weight": 0, "label": "number"},
        )
    )
    samples = [
        Sample("p", "42", meta={"answer": "42"}),
        Sample("p", "abc", meta={"answer": "42"}),
        Sample("p", "4"),
    ]
    with closing(reward):
        right, wrong, unknown = reward.score(samples)
    assert reward.name == "1 · exact + 0.5 · length + 0 · number"
    assert right == Score(1.5, None, {"exact": 1.0, "length": 1.0, "number": 42.0})
    assert wrong == Score(0.75, None, {"exact": 0.0, "length": 1.5, "number": None})
    assert unknown == Score(
        None, "exact: the sample has no answer", {"exact": None, "length": 0.5, "number": 4.0}
    )  # never 0.25


class Fixed:
    name = "fixed"
    maximum = 2.0

    def __init__(self, *values):
        self.values = values

    def score(self, samples):
        return [Score(v) if v is not None else Score(None, "it's broken") for v in self.values]

    def close(self):
        self.values = ()


def combined(**parts):
    """A reward of parts, each given as (reward, options of its RewardPart)."""
    rewards = {name: reward for name, (reward, _) in parts.items()}
    counts = {name: RewardPart(name=name, **options) for name, (_, options) in parts.items()}
    return CombinedReward("sum", rewards, counts)


def test_every_unknown_part_is_named_and_a_sum_is_finite():
    reward = combined(
        a=(Fixed(None, 1e308, -1.0), {"weight": 10.0}), b=(Fixed(None, 1.0, 4.0), {"weight": 0.5})
    )
    both, huge, fine = reward.score([Sample("p", "r")] * 3)
    assert (both.value, both.error) == (None, "a: it's broken; b: it's broken")
    assert (huge.value, huge.error) == (None, "the sum is inf")
    assert fine == Score(-8.0, None, {"a": -1.0, "b": 4.0})


def test_caps_and_gates():
    """By hand: b counts as at most 2 and at least 0; a below .5 closes the gate, behind which only a counts.
    Two open rows are 1 + .5 · 2 and .5 + .5 · 0; closed: .4 alone, though b is 9."""
    parts = {
        "a": (Fixed(1.0, 0.5, 0.4, None), {"gate": 0.5}),
        "b": (Fixed(9.0, -3.0, 9.0, 9.0), {"weight": 0.5, "at_least": 0.0, "at_most": 2.0}),
        "c": (Fixed(7.0, 7.0, 7.0, 7.0), {"weight": 0.0}),
    }
    reward = combined(**parts)
    scores = reward.score([Sample("p", "r")] * 4)
    assert [score.value for score in scores] == [2.0, 0.5, 0.4, None]
    assert scores[3].error == "a: it's broken"
    assert scores[2].parts == {"a": 0.4, "b": 9.0, "c": 7.0}
    assert reward.maximum == 2.0 + 0.5 * 2.0


def test_a_gate_without_a_weight_counts_nothing_and_is_needed():
    reward = combined(g=(Fixed(1.0, 0.0, None), {"weight": 0.0, "gate": 1.0}), b=(Fixed(2.0, 2.0, 2.0), {}))
    assert [score.value for score in reward.score([Sample("p", "r")] * 3)] == [2.0, 0.0, None]


def test_a_part_behind_a_closed_gate_is_0_whatever_its_caps():
    reward = combined(g=(Fixed(0.0), {"weight": 0.0, "gate": 1.0}), b=(Fixed(2.0), {"at_least": 0.5}))
    assert reward.score([Sample("p", "r")])[0].value == 0.0


def test_from_a_step_to_the_store_and_the_metrics(tmp_path):
    tokens = {"tokens": np.array([5, 6]), "action": np.array([False, True])}
    found = [Sample("p", str(i), prompt_id="p", meta={"index": i}, **tokens) for i in range(3)]
    engine = SimpleNamespace(failures=0, proposed=0, accepted=0, measured={})
    rollout = SimpleNamespace(sample=lambda *_, **__: iter(found), engine=engine)
    reward = combined(a=(Fixed(1.0, 0.0, None), {}), b=(Fixed(3.0, None, None), {"weight": 0.0}))
    with Store.open(tmp_path / "store.db") as store:
        made = collect(rollout, [Prompt("p")], SamplerConfig(n=3), store, Task(run="run", step=1), reward)
        stored = list(store.samples())
        store.set_rewards([(stored[0].id, 2.0, {"first": 1}), (stored[0].id, 3.0, {"second": 2})])
        [again] = store.samples(ids=[stored[0].id])
    assert [s.meta for s in stored] == [
        {"index": 0, "reward_parts": {"a": 1.0, "b": 3.0}},
        {"index": 1, "reward_parts": {"a": 0.0, "b": None}},
        {"index": 2, "reward_error": "a: it's broken", "reward_parts": {"a": None, "b": None}},
    ]
    assert made == CollectResult(tuple(s.id for s in stored), failed=1, tokens=3)
    assert (again.reward, again.meta) == (
        3.0,
        {"index": 0, "first": 1, "second": 2},
    )  # an earlier scoring's parts go
    assert describe_batch(Valid(stored), made, 0)["reward_parts"] == {"a": 0.5, "b": 3.0}
    foreign = Valid([Sample("p", "r", reward=1.0, meta={"reward_parts": "a foreign log's own"}, **tokens)])
    assert describe_batch(foreign, made, 0)["reward_parts"] is None


def test_the_configuration_comes_back_from_config_json(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[[reward.functions]]\nname = "math"\n[[reward.functions]]\nname = "f.py:g"\nweight = 0.1\n'
    )
    for config in (RunConfig.load(recipe), RunConfig()):
        resolved = tmp_path / "config.json"
        resolved.write_text(config.model_dump_json())
        assert RunConfig.load(resolved) == config
    assert RunConfig.load(recipe).reward.title == "1 · math + 0.1 · f.py:g"
    assert RunConfig().reward.name == RunConfig().reward.title == "exact"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"name": "exact", "functions": [{"name": "math"}]},
            "reward.name and reward.functions exclude each other",
        ),
        (
            {"options": {"a": 1}, "functions": [{"name": "a"}]},
            "reward.options and reward.functions exclude each other",
        ),
        ({"functions": [{"name": "math"}, {"name": "math"}]}, "reward.functions: math"),
        ({"functions": [{"name": "math", "weight": 0}]}, "expected one weight other than 0"),
        ({"clip": [1.0, -1.0]}, "lower bound below the upper one, got 1.0 and -1.0"),
        ({"functions": [{"name": "math", "at_least": 2, "at_most": 1}]}, "got 2.0 and 1.0"),
        ({"functions": [{"name": "math", "wieght": 1}]}, "did you mean reward.functions.0.weight?"),
        ({"functions": [{"name": "math", "weight": float("inf")}]}, "expected a finite number, got inf"),
    ],
)
def test_contradictions_are_refused(reward, message):
    with pytest.raises(Refused) as refused:
        RunConfig.of({"reward": reward})
    assert message in str(refused.value)


@pytest.mark.test
def test_a_reward_that_fails_to_load_is_refused_with_its_place(functions):
    with pytest.raises(
        Refused, match=r"reward.functions.1: reward.name: .* has no 'lenght'; did you mean length\?"
    ):
        load_reward(settings({"name": f"{functions}:length"}, {"name": f"{functions}:lenght"}))
