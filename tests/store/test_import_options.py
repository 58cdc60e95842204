"""Options of an import: a file that is imported again, tokens of the response alone, rewards relative to a
user's."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import sample, texts, write_lines

from agro.errors import Refused
from agro.logs import format_table
from agro.logs.importing import Components, Statistics, import_files
from agro.logs.interchange import from_record
from agro.logs.mapping import parse_map
from agro.store import Pair, Store
from agro.types import Text

# Three records, each with two columns of responses and of rewards.
ROWS = [{"q": f"Q{i}", "a": f"a{i}", "b": f"b{i}", "x": i, "y": -i} for i in range(3)]
A = {"prompt": "q", "response": "a", "reward": "x"}
B = {"prompt": "q", "response": "b", "reward": "y"}


def test_another_map_is_refused_by_name(into: Store, load: Any) -> None:
    load(*ROWS, mapping=A)
    with pytest.raises(Refused, match=r"with other options \(--map\)\. They were .*'reward': 'x'.*--replace"):
        load(*ROWS, mapping=B)
    assert texts(into.samples()) == ["a0", "a1", "a2"]
    assert load(*ROWS, mapping=A).duplicates == 3


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"format": "interchange"}, "--format"),
        ({"rewards": {"x": 2.0}}, "--reward"),
        ({"choose": {"filter": "strict"}}, "--choose"),
        ({"drop": ["meta.x"]}, "--drop"),
        ({"redact": True}, "--redact"),
    ],
)
def test_each_option_of_reading_is_compared(load: Any, option: dict[str, Any], name: str) -> None:
    row = {"prompt": "Q", "response": "A", "x": 1}
    load(row)
    with pytest.raises(Refused) as refusal:
        load(row, **option)
    assert f"with other options ({name})." in str(refusal.value)


def test_replace_takes_the_records_anew(into: Store, load: Any) -> None:
    load(*ROWS, mapping=A)
    load({"prompt": "Q0", "response": "kept", "reward": 5}, name="other.jsonl")
    ids = [s.id for s in into.samples()]
    into.add_pairs([Pair(ids[1], ids[0]), Pair(ids[3], ids[0])])
    report = load(*ROWS, mapping=B, replace=True)
    assert (report.samples, report.scored, report.replaced, report.duplicates) == (3, 3, 3, 0)
    assert "replaced: 3 samples" in str(report)
    rewards = {s.response: s.reward for s in into.samples()}
    assert rewards == {"kept": 5, "b0": 0, "b1": -1, "b2": -2}
    assert min(s.id for s in into.samples() if s.response != "kept") > max(ids)  # no id is given twice
    assert (into.counts().samples, list(into.pairs())) == (4, [])
    assert texts(into.samples(redone=True)) == ["kept", "b0", "b1", "b2"]
    assert not into.tables.damage()
    assert load(*ROWS, mapping=B).duplicates == 3
    with pytest.raises(Refused, match=r"with other options \(--map\)"):
        load(*ROWS, mapping=A)


def test_what_is_not_replaced_stays(into: Store, load: Any) -> None:
    """Where all that would replace it is refused, and where runs drew from it."""
    load(*ROWS, mapping=A)
    with pytest.raises(Refused, match="all records are refused"):
        load(*ROWS, mapping={**A, "response": "x"}, replace=True)
    assert load(*ROWS, mapping=A).duplicates == 3
    into.draws.record("first", 4, [1, 2])
    into.draws.record("first", 6, [1])
    into.draws.record("second", 1, [3])
    with pytest.raises(Refused, match=r"first \(2 samples, steps 4 to 6\); second \(1 samples, step 1\)"):
        load(*ROWS, mapping=B, replace=True)
    assert texts(into.samples()) == ["a0", "a1", "a2"]


def test_strict_stores_nothing_where_a_record_is_refused(into: Store, load: Any) -> None:
    good = [{"prompt": "Q", "response": str(i)} for i in range(700)]  # more than one transaction takes
    bad = {"prompt": "Q", "response": None}
    with pytest.raises(Refused, match=r"--strict: .* got 1 refused[^$]*log\.jsonl:701: response"):
        load(*good, bad, strict=True)
    assert (into.counts().samples, into.imports.provenance()) == (0, [])
    assert load(*good, bad).samples == 700
    assert load(*good, name="fine.jsonl", strict=True).samples == 700


def completion(step: int, text: str) -> dict[str, Any]:
    return {"step": step, "prompt": "Q", "completion": text, "reward": 1.0, "advantage": 0.0}


def test_files_of_a_queue_repeat_its_rows(into: Store, tmp_path: Path) -> None:
    """TRL writes its queue, whose last rows are in the next file again; two responses may be equal."""
    first = write_lines(tmp_path / "1.jsonl", *(completion(1, text) for text in ("a", "b", "b")))
    second = write_lines(tmp_path / "2.jsonl", *(completion(2, text) for text in ("b", "b", "b", "c")))
    report = import_files(into, [first, second])
    assert (report.samples, report.repeated) == (5, {"TRL's queue": 2})
    assert "repeats of TRL's queue: 2 not taken again" in str(report)
    assert texts(into.samples()) == ["a", "b", "b", "b", "c"]
    again = import_files(into, [second])
    assert (again.samples, again.duplicates, again.repeated) == (0, 2, {"TRL's queue": 2})


def test_a_format_whose_identities_are_unique(into: Store, load: Any, monkeypatch: Any) -> None:
    once = replace(format_table.get("trl-completions"), once=True)
    monkeypatch.setitem(format_table.FORMATS, "trl-completions", once)
    assert load(*(completion(1, text) for text in ("a", "b", "b"))).repeated == {"TRL's queue": 1}
    assert texts(into.samples()) == ["a", "b"]


def test_a_replaced_file_gives_its_identities_back(load: Any) -> None:
    load(completion(1, "a"))
    report = load(completion(1, "a"), replace=True)
    assert (report.samples, report.replaced, report.repeated) == (1, 1, {})
    assert load(completion(2, "a"), name="2.jsonl").repeated == {"TRL's queue": 1}


def test_license_and_provenance_of_sources(into: Store, load: Any) -> None:
    two = [{"prompt": "Q", "response": r, "source": "bob"} for r in "23"]
    load({"prompt": "Q", "response": "1", "source": "alice"}, name="one.jsonl", license="CC-BY-4.0")
    load(*two, name="two.jsonl")
    into.append([sample("Q2", source="policy")])
    found = [(p.source, p.samples, p.file, p.license) for p in into.imports.provenance()]
    assert found == [("alice", 1, "one.jsonl", "CC-BY-4.0"), ("bob", 2, "two.jsonl", None)]
    assert load(*two, name="two.jsonl", license="MIT").duplicates == 2  # a later import may say it
    load(*two, name="two.jsonl")
    assert [p.license for p in into.imports.provenance()] == ["CC-BY-4.0", "MIT"]
    into.draws.record("run", 1, [2])
    assert [(p.source, p.samples) for p in into.imports.provenance("run")] == [("bob", 1)]


PROMPT = [1, 7, 8]  # ids of any prompt
MAP = parse_map(["response=completion", "tokens=token_ids", "behavior_logp=logprobs"])


class Letters:
    """Id 97 is "a"; 0 is a special token."""

    fingerprint = "letters"

    def prompt(self, text: Text) -> list[int]:
        return PROMPT

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)).replace("\0", "")


def row(text: str = "ab", **changes: Any) -> dict[str, Any]:
    ids = [*map(ord, text), 0]
    return {"prompt": "Q", "completion": text, "token_ids": ids, "logprobs": [-0.5] * len(ids), **changes}


@pytest.mark.parametrize("prompt", ["Q", [{"role": "user", "content": "Q"}]])
def test_the_prompts_tokens_are_put_before_them(into: Store, load: Any, prompt: Text) -> None:
    load(row(prompt=prompt, token_reward=[0, 1, 2], version=[4, 4, 5]), mapping=MAP, tokenizer=Letters())
    (s,) = into.samples()
    assert (s.prompt, s.response, s.tokenizer) == (prompt, "ab", "letters")
    assert s.tokens.tolist() == [*PROMPT, 97, 98, 0]
    assert s.action.tolist() == [False] * 3 + [True] * 3
    np.testing.assert_array_equal(s.behavior_logp, np.float32([np.nan] * 3 + [-0.5] * 3))
    np.testing.assert_array_equal(s.token_reward, np.float32([np.nan] * 3 + [0, 1, 2]))
    assert s.version.tolist() == [-1, -1, -1, 4, 4, 5]
    assert s.knows_behavior
    assert s.oldest_version == 4


def test_lists_of_responses_bring_a_list_of_tokens_each(into: Store, load: Any) -> None:
    rows = [row(text) for text in ("ab", "c")]
    lists = {name: [r[name] for r in rows] for name in ("completion", "token_ids", "logprobs")}
    load({"prompt": "Q", **lists}, mapping=MAP, tokenizer=Letters())
    assert [s.tokens.tolist()[3:] for s in into.samples()] == [[97, 98, 0], [99, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"logprobs": [-0.5] * 2},
            "behavior_logp: expected one value for each of the response's 3 tokens, got 2",
        ),
        ({"logprobs": [-0.5] * 6}, "behavior_logp: expected one value .* got 6"),
        ({"token_reward": [1]}, "token_reward: expected one value .* got 1"),
        ({"version": [1]}, "version: expected one value .* got 1"),
        ({"token_ids": [97, 99, 0]}, "tokens: expected those of the response 'ab', got those of 'ac'"),
        ({"token_ids": [*PROMPT, 97, 98, 0]}, "tokens: expected those of the response 'ab'"),
        ({"token_ids": [], "logprobs": []}, "tokens: expected those of the response 'ab'"),
    ],
)
def test_tokens_that_are_not_the_response_s(load: Any, changes: dict[str, Any], message: str) -> None:
    report = load(row(), row(**changes), mapping=MAP, tokenizer=Letters())
    assert report.samples == 1
    (refusal,) = report.refused
    assert re.search(message, refusal.reason)


def test_without_a_tokenizer_they_are_refused_with_the_way_out(load: Any) -> None:
    with pytest.raises(Refused, match=r"tokens: .*--tokenizer MODEL"):
        load(row(), mapping=MAP)


def test_a_prompt_that_only_the_tokens_have() -> None:
    """An empty prompt is at most one token (BOS); without ids all such prompts would be one group."""
    record = {"prompt": "", "response": "", "tokens": [1, 2, 3]}
    assert from_record({**record, "mask": [0, 1, 1]}).prompt == ""
    assert from_record({**record, "mask": [0, 0, 1], "prompt_id": "p"}).prompt == ""
    for fields in ({"mask": [0, 0, 1]}, {"action": [0, 0, 1]}):
        with pytest.raises(Refused, match="prompt: expected the text of the 2 tokens before the response"):
            from_record({**record, **fields})


RATINGS = [("alice", 1.0), ("alice", 3.0), ("bob", 10.0), ("bob", 10.0), ("carol", 7.0), ("bob", None)]

RATED = [
    {"prompt": f"{i}?", "response": "x", "reward": reward, "user": user}
    for i, (user, reward) in enumerate(RATINGS)
]


def test_a_field_that_a_scored_record_lacks_takes_nothing(into: Store, load: Any) -> None:
    message = r"--center-by task: sample 1 .*it has source, role, user.* --map meta.task="
    with pytest.raises(Refused, match=message):
        load(*RATED, center_by="task")
    assert into.counts().samples == 0


def test_rewards_are_centered_by_the_other_records_of_a_value(into: Store, load: Any) -> None:
    """By hand: of alice 1 and 3, bob 10 and 10, carol 7 the mean is 6.2, the variance within 2/2 = 1, among
    the means (2 · 4.2² + 2 · 3.8² + .8²)/2 = 32.4, of (5 − 9/5)/2 = 1.6 records: between (32.4 − 1)/1.6."""
    report = load(*RATED, center_by="user")
    assert "centered: 5 rewards by 3 values of user, between which 95% of their" in str(report)
    samples = list(into.samples())
    kept = 19.625 / (19.625 + 1)
    shifts = [kept * (3 - 6.2), kept * (1 - 6.2), kept * 3.8, kept * 3.8, 0.0]
    for s, (user, reward), shift in zip(samples, RATINGS, shifts, strict=False):
        assert s.reward == pytest.approx(reward - shift)
        expected = {"field": "user", "value": user, "shift": pytest.approx(shift), "reward": reward}
        assert s.meta["normalizer"] == expected
    assert load(*RATED, center_by="user").samples == 0
    assert [s.reward for s in into.samples()] == [s.reward for s in samples]
    with pytest.raises(Refused, match=r"with other options \(--center-by\)"):
        load(*RATED)
    load(*RATED, replace=True)
    assert [s.reward for s in into.samples()] == [reward for _, reward in RATINGS]
    with pytest.raises(Refused, match=r"--center-by task: sample \d+ .* --map meta.task="):
        load(*RATED, center_by="task", replace=True)


def of_users(users: int, each: int, apart: float, seed: int) -> list[Statistics]:
    """Ratings with a standard deviation of 1, of users whose means have one of `apart`."""
    rng = random.Random(seed)
    every = []
    for _ in range(users):
        found, lenience = Statistics(), rng.gauss(0, apart)
        for _ in range(each):
            found.add(rng.gauss(lenience, 1))
        every.append(found)
    return every


def test_components_are_those_that_were_drawn():
    found = [Components.of(of_users(60, 10, 0.5, seed)) for seed in range(40)]
    assert statistics.mean(c.within for c in found) == pytest.approx(1, abs=0.03)
    assert statistics.mean(c.between for c in found) == pytest.approx(0.25, abs=0.03)
    assert min(c.surprise for c in found) > 4
    chance = [Components.of(of_users(60, 10, 0.0, seed)) for seed in range(200)]
    assert statistics.stdev(c.surprise for c in chance) == pytest.approx(1, abs=0.15)
    assert sum(c.surprise > 4 for c in chance) == 0


def test_one_value_or_single_records_are_not_moved():
    for every in (of_users(1, 9, 1.0, 0), of_users(9, 1, 1.0, 0)):
        found = Components.of(every)
        assert (found.share, found.surprise) == (0.0, 0.0)
        assert found.shift(every[0], 5.0) == 0.0


def test_options_that_nothing_meets_are_said(load: Any) -> None:
    rows = [{"q": "Q", "a": f"{i}", "x": i} for i in range(3)]
    report = load(*rows, mapping=A | {"reward": "score"}, reward_map={"god": 1.0})
    assert "--map reward=score: no record has a value there; correct it with --replace" in str(report)
    assert "--reward-map: no reward was one of its words" in str(report)
    report = load({**rows[0], "x": "god"}, *rows, mapping=A, reward_map={"god": 1.0}, name="other.jsonl")
    assert not report.absent
    assert not report.wordless
