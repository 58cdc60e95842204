"""From prompts to samples in a store: what finished is there, whatever comes after it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from sampling import PROMPTS, by_index, end_with, rollout

from agro import config
from agro import rollout as rollouts
from agro.config import SamplerConfig
from agro.errors import Interrupted, Refused
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.rewards import Score
from agro.rollout import Activity, CollectResult, Rollout, Task, collect
from agro.rollout.engines import Continuation, Request
from agro.rollout.engines.hf import HF
from agro.store import Store
from agro.types import Prompt, Sample

ASKED = [Prompt("a", id="a"), Prompt("b", id="b")]
SAMPLER = config.SamplerConfig(n=3, max_new=6)
BACKWARD = [5, 2, 0, 4, 1, 3]  # the order in which the fake engine finishes the responses


class Fake:
    """Answers request i with i + 1 tokens. Calls `event` before the answer to number `at`."""

    version = 7
    measured: ClassVar[dict[str, float]] = {"servers": 2}

    def __init__(self, at: int = -1, event: Callable[[], None] = lambda: None) -> None:
        self.at, self.event = at, event

    def decode(
        self, waiting: deque[Request], sampler: config.SamplerConfig, seed: int
    ) -> Iterator[Continuation]:
        requests = {r.number: r for r in waiting}
        waiting.clear()
        for number in BACKWARD:
            if number == self.at:
                self.event()
            tokens = np.full(number + 1, 5)
            yield Continuation(requests[number], tokens, np.full(number + 1, -0.5), self.version)

    def load(self, weights: Path, version: int) -> None: ...

    def close(self) -> None: ...


class Numbers:
    """Scores a response by its number; those of `failing` fail."""

    name = "numbers"

    def __init__(self, *failing: int) -> None:
        self.failing = failing

    def score(self, samples) -> list[Score]:
        return [
            Score(None, "no") if s.meta["index"] in self.failing else Score(s.meta["index"] / 10)
            for s in samples
        ]

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    spec = config.NewModel(alphabet="abcdef", hidden=8, layers=1, heads=1, context=32)
    return Policy.load(config.PolicyConfig(new=spec), seed=0).encoder


@pytest.fixture(autouse=True)
def _flush_at_once(monkeypatch) -> None:
    monkeypatch.setattr(rollouts, "FLUSH_SECONDS", 0.0)


def made(encoder: Encoder, store: Store, engine=None, reward=None, activity=None, **about) -> CollectResult:
    rollout = Rollout(encoder, engine or Fake())
    return collect(rollout, ASKED, SAMPLER, store, Task(**about), reward, activity)


class Collection:
    """A store, and what is collected into it."""

    def __init__(self, path: Path, store: Store, encoder: Encoder) -> None:
        self.path, self.store, self.encoder = path, store, encoder

    def of(self, engine=None, reward=None, activity=None, **about) -> CollectResult:
        return made(self.encoder, self.store, engine, reward, activity, **about)

    @property
    def stored(self) -> list[Sample]:
        """What another process would see of it."""
        with Store.open(self.path, read_only=True) as store:
            return list(store.samples())


@pytest.fixture
def collected(tmp_path: Path, encoder: Encoder) -> Iterator[Collection]:
    with Store.open(tmp_path / "s.db") as store:
        yield Collection(tmp_path / "s.db", store, encoder)


def test_ids_are_by_number_and_samples_are_scored(collected) -> None:
    found = collected.of(reward=Numbers(4), run="r", step=2, seed=11)
    samples = {s.id: s for s in collected.stored}
    ordered = [samples[i] for i in found.ids]
    assert [s.meta["index"] for s in ordered] == [0, 1, 2, 3, 4, 5]
    assert [s.id for s in ordered] == [BACKWARD.index(i) + 1 for i in range(6)]  # appended as they finished
    assert [s.prompt_id for s in ordered] == ["a"] * 3 + ["b"] * 3
    assert [s.reward for s in ordered] == [0.0, 0.1, 0.2, 0.3, None, 0.5]
    assert (found.failed, found.tokens) == (1, 1 + 2 + 3 + 4 + 5 + 6)
    assert {(s.version, s.sampling["seed"]) for s in ordered} == {(7, 11)}


def test_a_prompt_whose_id_the_store_knows_otherwise_is_refused_first(collected) -> None:
    collected.store.append([Sample("another", "x", prompt_id="b")])
    with pytest.raises(Refused, match="prompt_id: expected b to name one prompt, 'another'"):
        collected.of()
    assert len(collected.stored) == 1


@pytest.mark.parametrize("wait", [0.0, 1e9])  # seconds that a response may wait for others
def test_what_finished_is_stored_when_a_later_response_raises(collected, monkeypatch, wait: float) -> None:
    monkeypatch.setattr(rollouts, "FLUSH_SECONDS", wait)

    def fail() -> None:
        raise RuntimeError("no more")

    with pytest.raises(Refused, match=r"decode: .*no more"):
        collected.of(Fake(4, fail), Numbers())
    assert [(s.meta["index"], s.reward) for s in collected.stored] == [(5, None), (2, None), (0, None)]


def test_each_response_is_stored_as_soon_as_it_finishes(collected) -> None:
    counts: list[int] = []
    collected.of(Fake(1, lambda: counts.append(len(collected.stored))))
    assert counts[0] == 4


def test_a_kill_in_the_middle_keeps_what_finished(tmp_path: Path, encoder: Encoder) -> None:
    path, child = tmp_path / "s.db", os.fork()
    if not child:
        with Store.open(path) as store:
            made(encoder, store, Fake(1, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with Store.open(path) as store:
        indices = [s.meta["index"] for s in store.samples()]
        assert not store.tables.damage()
    assert indices == BACKWARD[: len(indices)]
    assert len(indices) >= 3


def test_what_is_rewarded_too_seldom_is_refused_and_stays(collected) -> None:
    with pytest.raises(Refused, match="3 of 6"):
        collected.of(reward=Numbers(0, 1, 2), max_failed=0.4)
    counts = collected.store.counts()
    assert (counts.samples, counts.failed) == (6, 3)


class Stages(Activity):
    """What is reported; a stop is asked for after so many checks."""

    def __init__(self, stop_after: int = 100) -> None:
        self.stop_after = stop_after
        self.reported: list[tuple] = []
        self.checks = 0

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        self.reported.append((name, done, total))

    def fail(self, kind: object, error: str) -> None:
        raise AssertionError(error)

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.stop_after:
            raise Interrupted


def test_an_activity_sees_how_far_it_is(collected) -> None:
    seen = Stages()
    collected.of(reward=Numbers(), activity=seen)
    assert seen.reported == [*(("sampling", i, 6) for i in range(7)), ("scoring", None, None)]
    assert seen.checks >= 5


def test_an_activity_may_stop_it_and_nothing_is_scored(collected) -> None:
    with pytest.raises(Interrupted):
        collected.of(reward=Numbers(), activity=Stages(stop_after=3))
    assert [(s.meta["index"], s.reward) for s in collected.stored] == [(i, None) for i in BACKWARD[:3]]


def test_a_sample_says_where_it_is_from(tiny):
    policy = tiny()
    options = SamplerConfig(max_new=3, temperature=0.9, stop=("zz",))
    samples = by_index(rollout(policy, version=7).sample(PROMPTS, 2, options))
    s = samples[7]
    assert (s.prompt, s.prompt_id, s.role, s.source, s.version) == ("h", PROMPTS[3].id, "policy", "policy", 7)
    assert s.meta.items() >= {"answer": "e", "index": 7}.items()
    assert (s.tokenizer, s.reward) == (policy.fingerprint, None)
    assert json.loads(json.dumps(s.sampling))["temperature"] == 0.9
    assert s.sampling["stop"] == ["zz"]
    assert s.tokens[: len(policy.encoder.prompt("h"))].tolist() == policy.encoder.prompt("h")
    assert s.response == policy.encoder.decode(s.tokens[s.action])
    for s in samples.values():
        ended = s.tokens[-1] == 2
        assert s.meta["finish"] == ("stop" if ended else "length")
        assert int(s.action.sum()) == 3 or ended
    assert policy.encode(s) == s


def test_a_stop_text_ends_a_response_and_is_cut_off(tiny):
    policy = tiny()
    end_with(policy)
    free = by_index(rollout(policy).sample(PROMPTS, 8, SamplerConfig(max_new=40)))
    stops = ("g", "dg", "ha")  # "dg" begins before the "g" that ends it
    stopped = by_index(rollout(policy).sample(PROMPTS, 8, SamplerConfig(max_new=40, stop=stops)))
    finished = Counter()
    for i, s in stopped.items():
        whole = free[i].response
        cuts = [whole.find(x) for x in stops if x in whole]
        assert s.response == (whole[: min(cuts)] if cuts else whole)
        assert s.meta["finish"] == ("stop" if cuts else "length")
        finished[s.meta["finish"]] += 1
        if cuts:  # the tokens end with the one that completed the stop text
            text = policy.encoder.decode(s.tokens[s.action])
            assert any(text.endswith(x) for x in stops)
            assert not any(x in text[:-1] for x in stops)
    assert finished["stop"] > 5


def test_a_prompt_without_room_is_refused_before_anything_is_computed(tiny, monkeypatch):
    policy = tiny(max_position_embeddings=20)
    sampler = rollout(policy)
    monkeypatch.setattr(policy.model.base_model, "forward", None)
    with pytest.raises(Refused, match=r"prompt too-long: 20 tokens leave no room .* context of 20"):
        sampler.sample([Prompt("a"), Prompt("a" * 19, id="too-long")], 1, SamplerConfig())


def test_no_prompts_give_no_responses(tiny):
    assert list(rollout(tiny()).sample([], 4, SamplerConfig())) == []


def test_an_empty_stop_text_is_refused(tiny):
    """It stands in every text: each response would be cut at its first character."""
    policy = tiny()

    class Silent:
        name, stop = "silent", ("d", "")

    with pytest.raises(Refused, match=r"sampler\.stop"):
        rollout(policy).sample(PROMPTS, 1, SamplerConfig(stop=("a", "")))
    with pytest.raises(Refused, match="environment silent: stop"):
        Rollout(policy.encoder, HF(policy), Silent(), 2).sample(PROMPTS, 1, SamplerConfig())
