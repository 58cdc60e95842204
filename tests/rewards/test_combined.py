"""Rewards of several parts, and what is made of them: sums, meanings, whitening, steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agro.config import RewardConfig, RewardPart, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.objectives.advantage import normalized_by_part
from agro.objectives.reduce import Groups
from agro.rewards import Score, load_reward, number
from agro.rewards.shaping import (
    CombinedReward,
    MeaningfulReward,
    by_token,
    shaped,
    shares,
    step_ends,
    steps,
    turn_ends,
)
from agro.rollout import CollectResult, Task, collect
from agro.store import Store
from agro.train.feed import Valid
from agro.train.measure import describe_batch
from agro.types import Batch, Prompt, Sample


def configured(**reward):
    return RunConfig.of({"reward": reward}).reward


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
    parts = [
        {"name": "exact"},
        {"name": f"{functions}:length", "weight": 0.5, "options": {"unit": 2}, "label": "length"},
        {"name": f"{functions}:number", "weight": 0, "label": "number"},
    ]
    reward = load_reward(configured(functions=parts))
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
    engine = SimpleNamespace(measured={})
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
    # an earlier scoring's parts go
    assert (again.reward, again.meta) == (3.0, {"index": 0, "first": 1, "second": 2})
    found = describe_batch(Valid(stored, collected=made), 0, RewardConfig())
    assert found["reward_parts"] == {"a": 0.5, "b": 3.0}
    foreign = Valid([Sample("p", "r", reward=1.0, meta={"reward_parts": "a foreign log's own"}, **tokens)])
    assert describe_batch(foreign, 0, RewardConfig())["reward_parts"] is None


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
        ({"functions": [{"name": "math", "weight": 0}]}, "expected at least one nonzero weight"),
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
        load_reward(configured(functions=[{"name": f"{functions}:{n}"} for n in ("length", "lenght")]))


def of(prompt, reward, **parts):
    meta = {"reward_parts": parts} if parts else {}
    return Sample(prompt, f"r{reward}", reward=reward, prompt_id=prompt, meta=meta)


TWO = {"functions": [{"name": "a"}, {"name": "b", "weight": 0.1}, {"name": "c", "weight": 0}]}


def test_one_reward_over_its_group_or_its_step():
    """Groups (0, 2) and (5, 5): ±√½ and 0. Over the step the mean is 3 and the deviation √(18/3)."""
    samples = [of("p", 0.0), of("p", 2.0), of("q", 5.0), of("q", 5.0), of("q", None)]
    by_group = [s.reward for s in shaped(samples, configured(name="exact", whiten="group"))]
    assert by_group[:2] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)
    assert by_group[2:] == [0.0, 0.0, None]
    by_step = [s.reward for s in shaped(samples, configured(name="exact", whiten="batch"))]
    assert by_step[:4] == pytest.approx([-3 / 6**0.5, -1 / 6**0.5, 2 / 6**0.5, 2 / 6**0.5], abs=1e-6)
    clipped = shaped(samples, configured(name="exact", whiten="batch", clip=[-1, 0.5]))
    assert [s.reward for s in clipped] == [-1.0, pytest.approx(-1 / 6**0.5, abs=1e-6), 0.5, 0.5, None]
    within = shaped(samples, configured(name="exact", clip=[1, 3]))
    assert [s.reward for s in within] == [1, 2, 3, 3, None]


def test_equal_rewards_are_whitened_to_0():
    """Also where their mean isn't exactly them, as of three times 0.1."""
    samples = [of("p", 0.1)] * 3
    for over in ("group", "batch"):
        assert [s.reward for s in shaped(samples, configured(name="exact", whiten=over))] == [0.0] * 3


def test_parts_are_whitened_each_before_their_weights():
    """a is (0, 1, 1, 0), b (100, 0, 100, 0): ±√¾ each, so b adds a tenth however large it is.

    GDPO's advantage is this before it is normalized over the step.
    """
    rows = [(0.0, 100.0), (1.0, 0.0), (1.0, 100.0), (0.0, 0.0)]
    samples = [of("p", a + 0.1 * b, a=a, b=b, c=None) for a, b in rows]
    whitened = [s.reward for s in shaped(samples, configured(whiten="group", **TWO))]
    assert whitened == pytest.approx([0.75**0.5 * x for x in (-0.9, 0.9, 1.1, -1.1)], abs=2e-6)
    parts = torch.tensor(rows, dtype=torch.float64)
    extra = {"reward_parts": parts, "part_weights": torch.tensor([[1.0, 0.1]] * 4, dtype=torch.float64)}
    batch = Batch.of(mask=[[0, 1]] * 4, reward=[0.0] * 4, group=["p"] * 4, extra=extra)
    advantage = normalized_by_part(Groups.of(batch)).numpy()
    assert advantage == pytest.approx(np.array(whitened) / np.std(whitened), abs=1e-12)


def test_shares_of_the_variance_within_groups():
    """Both parts independent: Var a = ¼, Var .1 b = 25, so 1/101 and 100/101. What differs between groups
    alone has none of it."""
    rows = [(0.0, 100.0), (1.0, 0.0), (1.0, 100.0), (0.0, 0.0)]
    samples = [of("p", a + 0.1 * b, a=a, b=b) for a, b in rows]
    found = shares([*samples, of("q", 999.0, a=999.0, b=0.0)], configured(**TWO))
    assert found == pytest.approx({"a": 1 / 101, "b": 100 / 101})
    assert shares([of("q", 1.0, a=1.0, b=0.0)], configured(**TWO)) == {"a": None, "b": None}


def test_a_part_that_works_against_the_others_has_a_negative_share():
    """a = (0, 1), b = (5, 0): the sum is (.5, 1), of which a makes 2 and .1 b −1."""
    samples = [of("p", 0.5, a=0.0, b=5.0), of("p", 1.0, a=1.0, b=0.0)]
    assert shares(samples, configured(**TWO)) == pytest.approx({"a": 2.0, "b": -1.0})


def test_a_log_without_parts_is_refused_by_whitening_and_has_no_share():
    imported = [of("p", 1.0), of("p", 0.0)]
    with pytest.raises(Refused, match="its part a isn't recorded"):
        shaped(imported, configured(whiten="group", **TWO))
    assert shares(imported, configured(**TWO)) == {"a": None, "b": None}


def spelled(completions: list[str], **_: Any) -> list[float]:
    return [number(text.lower().strip(" .")) for text in completions]


def unit_tests(completions: list[str], **_: Any) -> list[float]:
    """Which of three inputs a program f(x) gets right."""
    results = []
    for program in completions:
        passed = [eval(program, {"x": x}) == 2 * x for x in (0, 1, 2)]
        results.append(float(sum(p << i for i, p in enumerate(passed))))
    return results


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def known_of_two(completions: list[str], **_: Any) -> list[float | None]:
    return [0.0 if text == "2" else None for text in completions]


def scores(texts: list[str], meaning: Callable[..., Any]) -> list[Any]:
    config = RewardConfig(name="inline:length", meaning="inline:meaning")
    reward = load_reward(config, {"inline:length": length, "inline:meaning": meaning})
    assert isinstance(reward, MeaningfulReward)
    return reward.score([Sample("p", text) for text in texts])


def test_spellings_of_one_answer_have_one_number() -> None:
    found = scores(["Yes.", "yes", "no"], spelled)
    assert [score.value for score in found] == [4, 3, 2]
    assert found[0].meaning == found[1].meaning != found[2].meaning
    assert found[0].meta == {"meaning": number("yes")}


def test_a_number_is_an_integer_that_a_float_has_exactly() -> None:
    """Of 2,000 texts no two share one: by chance it happens once in 4 billion times."""
    numbers = {number(str(i)) for i in range(2000)}
    assert len(numbers) == 2000
    assert all(value == int(value) < 2**53 for value in numbers)


def test_programs_with_the_same_results_mean_the_same() -> None:
    found = scores(["2*x", "x+x", "x*x", "x**2"], unit_tests)
    assert [score.meaning for score in found] == [7, 7, 5, 5]


def test_without_a_meaning_there_is_no_reward() -> None:
    found = scores(["1", "2"], known_of_two)
    assert (found[0].value, found[1].value) == (None, 1)
    assert found[0].error.startswith("meaning: ")


def test_a_function_that_there_is_not_is_refused_with_its_setting() -> None:
    with pytest.raises(Refused, match=r"reward\.meaning: "):
        load_reward(RewardConfig(name="exact", meaning="nowhere.py:meaning"))


TEXT = "a 1\n\nb\nc 22"
FUNCTION = """
def each(completions, wanted):
    return [[float(n) for n in counts] for counts in wanted]
"""


def decode(ids) -> str:
    """A character a token; 0 is the end token."""
    return "".join(chr(i) for i in ids if i)


def written(text: str, turns: str = "", **fields) -> Sample:
    """`turns`: of each character p for the policy's, e for the environment's."""
    ids = [62, *map(ord, text), 0]
    action = np.array([False, *(c == "p" for c in turns or "p" * len(text)), True])
    return Sample("p", text, tokens=np.array(ids), action=action, **fields)


def test_steps_are_the_parts_that_arent_blank() -> None:
    assert steps(TEXT, "\n") == [("a 1", 3), ("b", 6), ("c 22", 11)]
    assert steps(" \n", "\n") == []


def test_a_step_ends_with_its_last_character_and_the_last_one_with_the_end_token() -> None:
    assert step_ends(written(TEXT), "\n", decode).tolist() == [3, 6, 12]
    merged = written(TEXT).replace(tokens=np.array([62, *map(ord, TEXT), 0]))
    found = step_ends(merged, "\n", lambda ids: decode(ids)[: 2 * (len(ids) // 2)])  # two characters a token
    assert found.tolist() == [4, 6, 12]


def test_turns_end_where_the_environment_begins() -> None:
    assert turn_ends(written("abcdef", "ppeepp")).tolist() == [2, 7]


def test_rewards_come_with_the_last_tokens_and_replace_their_sum() -> None:
    sample = written(TEXT, reward=1.5, meta={"place_rewards": [0.5, 0.0, 1.0]})
    [spread, other] = by_token([sample, written("x", reward=2.0)], "\n", decode)
    assert (spread.reward, other.reward, other.token_reward) == (None, 2.0, None)
    assert np.isnan(spread.token_reward[0])
    assert np.flatnonzero(np.nan_to_num(spread.token_reward)).tolist() == [3, 12]
    assert np.nansum(spread.token_reward) == 1.5
    tokens = written("ab", reward=3.0, meta={"place_rewards": [1.0, 0.5, 1.5]})
    assert by_token([tokens], "token", decode)[0].token_reward[1:].tolist() == [1.0, 0.5, 1.5]


@pytest.fixture
def each(tmp_path: Path):
    (tmp_path / "each.py").write_text(FUNCTION)
    return lambda **more: configured(name=f"{tmp_path / 'each.py'}:each", **more)


@pytest.mark.test
def test_a_function_gives_a_number_for_each_step_or_turn(each) -> None:
    """A wrong number of them, an episode of several rows and steps of several turns leave it unknown."""
    samples = [
        written(TEXT, meta={"wanted": [1, 2, 3]}),
        written(TEXT, meta={"wanted": [1, 2]}),
        written("abcdef", "ppeepp", meta={"wanted": [1, 2]}),
        written("ab", meta={"wanted": [1]}, episode="e"),
    ]
    with closing(load_reward(each(places="\n"))) as reward:
        found = reward.score(samples)
    assert [score.value for score in found] == [6.0, None, None, None]
    assert found[0].meta == {"place_rewards": [1.0, 2.0, 3.0]}
    assert [score.error for score in found[1:]] == [
        "returned 2 numbers for 3 steps",
        "the response has several turns; set reward.places = 'turn'",
        "the template rewrote the episode's history: it has several sequences of tokens",
    ]
    with closing(load_reward(each(places="turn"))) as reward:
        assert [score.value for score in reward.score(samples[2:3])] == [3.0]


def test_what_excludes_steps_is_refused(each) -> None:
    with pytest.raises(Refused, match=r"reward\.places excludes"):
        each(places="\n", clip=[0, 1])
    with pytest.raises(Refused, match=r"reward\.places is for functions, and exact isn't one"):
        load_reward(configured(name="exact", places="turn"))
