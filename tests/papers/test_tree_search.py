"""`tree_search`: a tree of turns for each prompt, whose turns are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiers import some
from tiny_runs import interrupted, metrics, tiny, weights, whole_and_resumed

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.store import Pair, Store
from agro.train.check import check_config
from agro.train.phases import derive
from agro.types import Prompt, Sample
from agro_papers.tree_search import Action, State, Tree, best_first, by_ucb, step_pairs

DIGITS = "0123"
SPELLING = Path(__file__).parents[2] / "examples/environments/spelling.py"
BUDGET = {"branches": 4, "expansions": 8}


def on_locks(folder: Path, **changes: Any) -> RunConfig:
    """16 locks of three digits: a wrong one ends the episode."""
    prompts = [{"prompt": f"{a}{b}>", "answer": f"{a}{b}{(a + b) % 4}"} for a in range(4) for b in range(4)]
    (folder / "locks.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values: dict[str, Any] = {
        "policy": {"new": {"alphabet": DIGITS + ">", "hidden": 16, "layers": 1, "heads": 2, "context": 16}},
        "data__prompts": str(folder / "locks.jsonl"),
        "environment": {"name": f"{SPELLING}:Spelling", "max_turns": 3, "options": {"characters": DIGITS}},
        "sampler": {"max_new": 1},
        "reward": {"name": "exact"},
        "objective": {"name": "agent_q", "beta": 0.1, "singletons": "drop"},
        "source": {"around": "tree_search", "options": {"by": "ucb", **BUDGET}},
        "train__steps": 4,
    }
    return tiny(folder, **{**values, **changes})


FIRST = {"source__options": {"by": "best", "train": "path", **BUDGET}, "objective": {"name": "sft"}}


def drawn(run: Path) -> list[int]:
    name = json.loads((run / "config.json").read_text())["run"]
    with Store.open(run / "store.db", read_only=True) as store:
        return [draw.sample for draw in store.draws.drawn(name)]


def stored(run: Path) -> dict[int, Sample]:
    with Store.open(run / "store.db", read_only=True) as store:
        return {s.id: s for s in store.samples()}


def pairs_of(run: Path) -> list[Pair]:
    with Store.open(run / "store.db", read_only=True) as store:
        return list(store.pairs())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("locks")
    return Trainer(on_locks(folder), folder / "run").run()


def test_pairs_share_their_prefix_and_their_winner_is_worth_more(run: Path) -> None:
    samples, pairs = stored(run), pairs_of(run)
    assert pairs
    for pair in pairs:
        winner, loser = samples[pair.winner], samples[pair.loser]
        assert winner.prompt == loser.prompt
        assert winner.reward - loser.reward > 0.2
    assert set(drawn(run)) == {i for pair in pairs for i in (pair.winner, pair.loser)}
    assert sum(row["searched"] for row in metrics(run) if row["step"]) == 4 * 4 * 8
    assert metrics(run)[-1]["objective"]["implicit_margin"] is not None


def test_the_tree_is_in_the_store(run: Path) -> None:
    """Each turn names the turn before it, whose state and text its own prompt begins with; values are the
    mean of the episodes below."""
    samples = stored(run)
    below: dict[int, list[Sample]] = {}
    for sample in samples.values():
        if "parent" in sample.meta:
            parent = samples[int(sample.meta["parent"])]
            assert sample.prompt.startswith(parent.prompt)
            assert len(sample.prompt) == len(parent.prompt) + 2  # the digit and the answer
            below.setdefault(parent.id, []).append(sample)
    assert below
    for i, children in below.items():
        tree = samples[i].meta["tree"]
        visits = [child.meta["tree"]["visits"] for child in children]
        assert tree["visits"] == sum(visits)
        total = sum(child.reward * n for child, n in zip(children, visits) if n)
        assert samples[i].reward == pytest.approx(total / sum(visits))


@pytest.mark.parametrize("by", some(["ucb", "best"], every=2))
def test_a_search_opens_locks_that_samples_dont_at_equal_tokens(tmp_path: Path, by: str) -> None:
    """16 states of 4 turns are 64 tokens at most; 64 episodes of samples have as many or more. The weights
    don't move, so that both are of the new model, which writes each digit about once in seven times."""
    still: dict[str, Any] = {"train__steps": 1, "train__groups": 16, "train__lr": 1e-12}
    search = {"by": by, "train": "path", "branches": 4, "expansions": 16}
    values = {"source__options": search, "objective": {"name": "sft"}, **still}
    searched = Trainer(on_locks(tmp_path, **values), tmp_path / "search").run()
    plain = {"source": {}, "objective": {"name": "grpo"}, "sampler": {"n": 64, "max_new": 1}, **still}
    sampled = Trainer(on_locks(tmp_path, **plain), tmp_path / "samples").run()
    found = stored(searched)
    opened = {root(s, found) for s in found.values() if s.reward == 1}
    by_samples = {s.prompt for s in stored(sampled).values() if s.reward == 1}
    assert metrics(searched)[-1]["sampled_tokens"] <= metrics(sampled)[-1]["sampled_tokens"]
    assert len(opened) >= 12
    assert len(by_samples) <= 6


def root(sample: Sample, samples: dict[int, Sample]) -> str:
    while "parent" in sample.meta:
        sample = samples[int(sample.meta["parent"])]
    return sample.prompt


def test_the_turns_of_right_episodes_alone_are_imitated(tmp_path: Path) -> None:
    run = Trainer(on_locks(tmp_path, **FIRST), tmp_path / "run").run()
    samples = stored(run)
    trained = drawn(run)
    assert trained
    for i in trained:
        prompt, turn = samples[i].prompt, len(samples[i].prompt.partition(">")[2]) // 2
        number = samples[i].meta["answer"]
        digit = samples[i].tokens[samples[i].action]
        assert samples[i].reward == 1
        assert prompt.partition(">")[2] == "".join(f"{d}>" for d in number[:turn])
        assert len(digit) == 1


def test_a_self_critique_is_half_of_a_value(tmp_path: Path) -> None:
    """The policy's probability of the answer is in (0, 1); with theta = 0 it alone makes pairs."""
    search = {"by": "ucb", **BUDGET, "critique": ">", "good": "1", "theta": 0.0}
    run = Trainer(on_locks(tmp_path, source__options=search, train__steps=1), tmp_path / "run").run()
    samples, pairs = stored(run), pairs_of(run)
    assert all(0 < s.meta["tree"]["critic"] < 1 for s in samples.values())
    assert pairs
    for pair in pairs:
        values = []
        for i in (pair.winner, pair.loser):
            tree = samples[i].meta["tree"]
            searched = tree["critic"] if tree["searched"] is None else tree["searched"]
            values.append(0.5 * searched + 0.5 * tree["critic"])
        assert values[0] > values[1]


@pytest.mark.parametrize("changes", some([FIRST, {}], every=2), ids=["path", "pairs"])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole_and_resumed(lambda folder: on_locks(folder, **changes), tmp_path, 3)


def tree_of(*rewards: float) -> tuple[Tree, list[Action]]:
    """Turns of the start, which lead to states; below those with a reward of 0 or more an episode ended."""
    tree = Tree(Prompt("p"), best_first(1.0))
    actions = []
    for reward in rewards:
        action = Action(Sample("p", "x"), "x", tree.start)
        action.next = State(Prompt("q"), ("x",), action)
        tree.start.actions.append(action)
        if reward >= 0:
            Action(Sample("q", "y"), "y", action.next).ends(reward)
        actions.append(action)
    tree.start.expansions = 1
    return tree, actions


def test_a_return_is_backed_up_to_the_start() -> None:
    tree, (first, second) = tree_of(1.0, -1)
    assert (first.visits, first.mean, first.best) == (1, 1.0, 1.0)
    assert (second.visits, second.mean) == (0, None)
    Action(Sample("q", "z"), "z", first.next).ends(0.0)
    assert (first.visits, first.mean, first.best, tree.best) == (2, 0.5, 1.0, 1.0)


def test_the_upper_confidence_bound_chooses_as_by_hand() -> None:
    """With a value of 1 and of 0, one episode each, the bounds are 1 + c √log 2 and c √log 2. After three
    more episodes of 0.5 below the first it is 0.625 + c √(log 5 / 4), and c √log 5 of the second."""
    tree, (first, second) = tree_of(1.0, 0.0)
    rule = by_ucb(1.0)
    ways = [first.next, second.next]
    assert rule(ways, tree.start) is first.next
    for _ in range(3):
        Action(Sample("q", "z"), "z", first.next).ends(0.5)
    assert rule(ways, tree.start) is second.next
    assert by_ucb(0.1)(ways, tree.start) is first.next
    tree, (first, second) = tree_of(1.0, -1)
    assert rule([first.next, second.next], tree.start) is second.next  # never visited


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"environment": None}, r"tree_search searches over the turns of an \[environment\]"),
        ({"objective": {"name": "sft"}}, 'with train = "pairs" is for objectives that need pairs'),
        (
            {"source__options": FIRST["source__options"]},
            'with train = "path" is for objectives that need no pairs',
        ),
        ({"data__spread": True}, r"data\.spread = True needs a source that returns one group"),
        ({"source__kind": "elsewhere"}, "tree_search needs a source that samples to prompts"),
    ],
)
def test_what_it_excludes_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        check_config(on_locks(tmp_path, **changes))


def checkpoint(run: Path, step: int) -> Path:
    [folder] = [path for path in (run / "checkpoints").iterdir() if int(path.name.split("-")[-1]) == step]
    return folder / "model.safetensors"


@pytest.mark.nightly
def test_a_phase_begins_with_the_first_weights(tmp_path: Path) -> None:
    """A restart on the store that the search filled: with a rate of nearly 0 it ends at the first weights,
    which have a version of their own. A run that is stopped in it resumes to the same bytes."""
    search = {"around": "tree_search", "options": FIRST["source__options"]}
    phases = [
        {"name": "search", "source": search, "train": {"steps": 3}},
        {
            "name": "restart",
            "data": {"replay": 1.0, "min_reward": 1.0},
            "train": {"steps": 2, "groups": 2, "start": "first", "lr": 1e-12},
        },
        {"name": "again", "source": search, "train": {"steps": 2}},
    ]
    config = on_locks(tmp_path, source={}, objective={"name": "sft"}, phases=phases, train__keep=9)
    run = Trainer(config, tmp_path / "whole").run()
    first = Policy.load(config.policy, seed=derive(config.train.seed, "weights")).weights()
    restarted = load_file(checkpoint(run, 5))
    searched = load_file(checkpoint(run, 3))
    assert all(torch.allclose(restarted[name], weight, atol=1e-9) for name, weight in first.items())
    assert not all(torch.allclose(searched[name], weight, atol=1e-4) for name, weight in first.items())
    assert [row["version"] for row in metrics(run)] == sorted(row["version"] for row in metrics(run))
    assert metrics(run)[-1]["version"] == 7 + 1
    interrupted(config, tmp_path / "run", 4)
    assert weights(Trainer(config, tmp_path / "run", resume=True).run()) == weights(run)


def action(visits: int, total: float, critic: float | None) -> Action:
    return Action(Sample("p", "x"), "x", State(Prompt("p")), None, critic, visits, total)


def test_a_value_is_that_of_the_search_and_of_the_critic() -> None:
    """Means of ¾ over 4 visits and a critic of ¼: α is the share of the search. Where one is unknown it is
    the other."""
    assert [action(4, 3.0, 0.25).value(alpha) for alpha in (0.0, 0.5, 1.0)] == [0.25, 0.5, 0.75]
    assert action(4, 3.0, None).value(0.5) == 0.75
    assert action(0, 0.0, 0.25).value(0.5) == 0.25
    assert action(0, 0.0, None).value(0.5) is None


def test_pairs_are_those_with_a_gap_above_theta_the_widest_first() -> None:
    """The gaps are 0.4, 0.3 and 0.7."""
    values = {1: 0.5, 2: 0.9, 3: 0.2}
    assert step_pairs(values, theta=0.35) == [Pair(2, 3), Pair(2, 1)]
    assert step_pairs(values, theta=0.0) == [Pair(2, 3), Pair(2, 1), Pair(1, 3)]
    assert step_pairs(values, theta=0.0, most=1) == [Pair(2, 3)]
    assert step_pairs(values, theta=0.7 + 1e-9) == []
    assert step_pairs({1: 0.5, 2: 0.5}, theta=0.0) == []
    with pytest.raises(Refused, match="theta of 0 or more, got -1"):
        step_pairs(values, theta=-1.0)
