from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from agro import Batch, Prompt, Sample
from agro.errors import Refused
from agro.types import prompt_hash, sample
from agro.types.conversation import normalized

NAN, INF = math.nan, math.inf
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "é?"}]
SAMPLE: dict[str, Any] = {"prompt": "1+1=", "response": "2", "reward": 1.0}
TOKENS: dict[str, Any] = {**SAMPLE, "tokens": [5, 6, 7, 8], "action": [False, False, True, True]}
THREE: dict[str, Any] = {
    "mask": [[False, True, True], [False, False, True], [False, True, False]],
    "reward": [1.0, 0.0, 2.0],
    "group": ["a", "a", "b"],
}


def refused(make: Any, /, **given: Any) -> str:
    with pytest.raises(Refused) as caught:
        make(**given)
    return str(caught.value)


def cases(table: dict[str, list[tuple[Any, str]]]) -> list[tuple[dict[str, Any], str]]:
    """(A field's value, what is said of it) for the values of each field."""
    return [({field: value}, f"{field}: {words}") for field, rows in table.items() for value, words in rows]


def test_prompt_hash() -> None:
    """The first digits of SHA-256("abc"), of the FIPS 180 examples; messages with any order of their keys."""
    assert prompt_hash("abc") == Prompt("abc").id == "ba7816bf8f01cfea"
    assert Prompt("abc", id="7").id == "7"
    assert len(prompt_hash("\ud800")) == len(Prompt("").id) == 16
    assert prompt_hash(MESSAGES) == prompt_hash([dict(reversed(m.items())) for m in MESSAGES])
    assert prompt_hash(MESSAGES) == Prompt(MESSAGES).id != prompt_hash(MESSAGES[1:])


EITHER = "prompt: expected text, or a list of messages with 'role' and 'content', got "


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        *((bad, f"{EITHER}{bad}") for bad in (None, 3, [], {"role": "user", "content": ""})),
        (["text"], "prompt[0]: expected a message with 'role' and 'content' (or 'tool_calls'), got 'text'"),
        ([{"role": "user"}], "prompt[0]: expected content, a refusal or tool_calls, got {'role': 'user'}"),
    ],
)
def test_a_prompt_is_text_or_messages(bad: Any, words: str) -> None:
    assert refused(Prompt, text=bad) == f"prompt: {words}"
    assert refused(Sample, **{**SAMPLE, "prompt": bad}) == f"sample: {words}"


def test_a_sample_of_texts_alone() -> None:
    s = Sample("1+1=", "2")
    assert s.reward is None
    assert s.prompt_id == prompt_hash("1+1=")
    assert (s.role, s.version, s.tokens, s.mask) == ("log", -1, None, None)
    assert not s.knows_behavior


def test_arrays_of_a_sample_are_typed_copied_and_frozen() -> None:
    arrays: dict[str, tuple[Any, str]] = {
        "tokens": (np.arange(4), "int32"),
        "action": (np.array([0, 0, 1, 1]), "bool"),
        "learn": ([0, 0, 0, 1], "bool"),
        "behavior_logp": (np.full(4, -0.1), "float32"),
        "context_tokens": ([1], "int32"),
        "token_reward": (np.zeros(4), "float32"),
        "version": ([0, 0, 3, 4], "int32"),
        "kept": ([2, 3], "int32"),
        "kept_count": ([0, 0, 1, 1], "int32"),
    }
    s = Sample(**SAMPLE, **{name: value for name, (value, _) in arrays.items()})
    for name, (_, kind) in arrays.items():
        assert getattr(s, name).dtype.name == kind
    arrays["tokens"][0][0] = 9
    assert s.tokens.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        s.tokens[0] = 9
    own = np.arange(4, dtype=np.int32)
    s = s.replace(tokens=own)
    own[0] = 9  # of the very type, and yet a copy: neither frozen for its owner nor shared
    assert s.tokens[0] == 0


def test_the_mask_is_learn_or_else_action() -> None:
    assert Sample(**TOKENS).mask.tolist() == [False, False, True, True]
    assert Sample(**TOKENS, learn=[0, 0, 0, 1]).mask.tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("logp", "knows"),
    [([0, 0, -1, -2], True), ([NAN, NAN, -1, 0], True), ([-1, -1, -1, NAN], False), (None, False)],
)
def test_behavior_is_known_where_every_action_has_it(logp: Any, knows: bool) -> None:
    assert Sample(**TOKENS, behavior_logp=logp).knows_behavior is knows


KEPT: dict[str, Any] = {"kept": [2, 7, 8, 9], "kept_count": [0, 0, 2, 2]}  # how many ids each token has


def test_kept_sets_are_compared() -> None:
    whole = Sample(**TOKENS, kept=[8, 9], kept_count=[0, 0, 0, 2])  # at the third token
    assert Sample(**TOKENS, **KEPT) != whole
    assert Sample(**TOKENS, **KEPT) == Sample(**TOKENS, **KEPT)


@pytest.mark.parametrize(
    ("sampling", "kept", "found"),
    [
        ({"top_p": 0.8, "top_k": 2}, {}, "top_k 2, top_p 0.8"),
        ({"top_p": 0.8, "top_k": 2}, KEPT, ""),
        ({"temperature": 0, "top_k": 2}, KEPT, "temperature 0"),  # there is no ratio to a greedy choice
    ],
)
def test_kept_sets_tell_what_truncation_excluded(sampling: Any, kept: Any, found: str) -> None:
    assert Sample(**TOKENS, **kept, sampling=sampling).truncation == found


@pytest.mark.parametrize("reward", [1, 0.5, np.float32(0.5), np.float64(0.5), np.int64(1), -0.0])
def test_rewards_become_python_floats(reward: Any) -> None:
    found = Sample("p", "r", reward=reward).reward
    assert type(found) is float
    assert found == reward


FINITE = "expected a finite number, or None where it is unknown, got"
LOGP = "expected log-probs (finite, at most 0; NaN where unknown), got"
FOUR = "expected one value for each of the 4 tokens, got"
EMPTY = "the mask of tokens to learn from is empty"
OF_A_SAMPLE = [
    *cases(
        {
            "response": [(None, "expected text, got None")],
            "role": [("teacher", "expected one of policy, log, expert, got 'teacher'")],
            "reward": [
                (NAN, f"{FINITE} nan"),
                (-INF, f"{FINITE} -inf"),
                (np.float32("nan"), "expected a finite number"),
                (True, f"{FINITE} True"),
                ("1", f"{FINITE} '1'"),
                (1j, "expected a finite number"),
            ],
            "tokens": [
                ([[5, 6, 7, 8]], "expected one dimension, got shape (1, 4)"),
                ([5, 6, 7.5, 8], "expected int32 values, got [5, 6, 7.5, 8]"),
                ([5, 6, 7, 2**40], "expected int32 values"),
                ([5, 6, "x", 8], "expected a list of int32"),
                ([5, [6], 7, 8], "expected a list of int32"),
                ([5, 6, -7, 8], "expected ids of the vocabulary, got -7 at index 2"),
            ],
            "action": [([0, 1, 1], f"{FOUR} 3"), ([0, 0, 1, 2], "expected bool values")],
            "learn": [([0, 1, 1, 0], "expected a subset of action, got index 1"), ([0, 1], f"{FOUR} 2")],
            "behavior_logp": [
                ([-1.0] * 5, f"{FOUR} 5"),
                ([0, 0, -1, 0.01], f"{LOGP} 0.0"),
                ([0, 0, -INF, -1], f"{LOGP} -inf at index 2"),
                ([0, INF, -1, -1], f"{LOGP} inf at index 1"),
            ],
            "context_tokens": [([-1], "expected ids of the vocabulary, got -1 at index 0")],
            "token_reward": [([0.0], f"{FOUR} 1"), ([0, 0, INF, 0], "expected finite numbers")],
            "version": [
                ([1, 2, 3], f"{FOUR} 3"),
                (-2, "expected a number of optimizer steps, or -1 where unknown, got -2"),
                ([0, 0, -5, 0], "expected a number of optimizer steps"),
                (1.5, "expected"),
            ],
        }
    ),
    ({"tokens": None}, "action given without tokens"),
    ({"action": None}, "tokens given without action"),
    (
        {"tokens": None, "action": None, "behavior_logp": [-1], "token_reward": [0]},
        "behavior_logp, token_reward given without",
    ),
    ({"action": [0, 0, 0, 0]}, EMPTY),
    ({"tokens": [], "action": []}, EMPTY),
    ({"learn": [0, 0, 0, 0]}, EMPTY),
    ({"kept": [1]}, "expected both kept and kept_count, or neither, got kept alone"),
    ({"kept_count": [0, 0, 2, 2]}, "expected both kept and kept_count, or neither, got kept_count alone"),
    (KEPT | {"kept": [2, 7, 8]}, "expected as many ids as kept_count adds up to, 4, got 3"),
    (KEPT | {"kept_count": [0, 2, 0, 2]}, "expected 0 where action is false, got a nonzero size at index 1"),
    (KEPT | {"kept_count": [0, 0, 4]}, f"kept_count: {FOUR} 3"),
    (KEPT | {"kept_count": [0, 0, 5, -1]}, "expected numbers of ids, got -1 at index 3"),
    (KEPT | {"kept": [7, 2, 8, 9]}, "expected ascending ids for each token, got another order at index 2"),
    (KEPT | {"kept": [2, 7, 8, 8]}, "expected ascending ids for each token, got another order at index 3"),
    (KEPT | {"kept": [2, 7, 4, 9]}, "expected the token at index 3, 8, among the ids that were kept for it"),
    (KEPT | {"kept": [-1, 7, 8, 9]}, "kept: expected ids of the vocabulary, got -1 at index 0"),
]


@pytest.mark.parametrize(("changes", "words"), OF_A_SAMPLE, ids=str)
def test_what_a_sample_refuses(changes: dict[str, Any], words: str) -> None:
    """Each message names the sample, by its row of the store where it has one, also among others."""
    given = {**TOKENS, **changes}
    said = refused(Sample, **given)
    reason = said.removeprefix(f"sample of prompt {prompt_hash('1+1=')}: ")
    assert reason != said
    assert words in reason
    assert refused(lambda: Sample.all_of([TOKENS, given, TOKENS])) == said
    assert refused(Sample, **given, id=17, prompt_id="q") == f"sample 17 of prompt q: {reason}"


FULL: dict[str, Any] = {"prompt": MESSAGES, "response": "2", "reward": 0.0, "prompt_id": "q", "episode": "e"}
FULL |= {"tokens": [5, 6, 7, 8], "action": [0, 1, 1, 1], "learn": [0, 0, 1, 1], "tokenizer": "f"}
FULL |= {"behavior_logp": [NAN, -0.5, 0.0, -0.25], "token_reward": [NAN, 0, 0.5, 0], "version": [3, 3, 3, 4]}
FULL |= {"sampling": {"temperature": 1.0}, "context_tokens": [4], "role": "policy", "source": "policy"}
FULL |= {"meta": {"answer": 2, "parts": [1.0, None]}}
NEXT = np.nextafter(np.float32(-0.5), np.float32(0))
OTHER_VALUES: dict[str, list[Any]] = {
    "prompt": [MESSAGES[1:]],
    "response": ["3"],
    "reward": [-0.0, None, 5e-324],
    "prompt_id": ["r"],
    "episode": [None],
    "tokens": [[5, 6, 7, 9]],
    "action": [[0, 0, 1, 1]],
    "learn": [None],
    "tokenizer": [None],
    "behavior_logp": [[NAN, -0.5, -0.0, -0.25], [NAN, -0.5, 0.0, NAN], [NAN, NEXT, 0.0, -0.25], None],
    "sampling": [{"temperature": 1}, None],
    "context_tokens": [[4, 4]],
    "token_reward": [None],
    "version": [[3, 3, 3, 3], 3],
    "role": ["log"],
    "source": [""],
    "meta": [{"answer": a, "parts": [p, None]} for a, p in ((2, 1), (2, True), (2.0, 1.0))] + [{}],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in OTHER_VALUES.items() for value in values],
    ids=str,
)
def test_samples_are_equal_bit_for_bit(field: str, value: Any) -> None:
    assert Sample(**FULL) == Sample(**FULL)
    other = Sample(**FULL).replace(**{field: value})
    assert Sample(**FULL) != other
    assert other == Sample(**{**FULL, field: value})


def test_equality_leaves_the_row_of_the_store_out() -> None:
    """And the order in which keys of meta were put, and what kind of NaN stands for unknown."""
    assert Sample(**FULL, id=1) == Sample(**FULL, id=2)
    assert Sample(**FULL).replace(meta=dict(reversed(FULL["meta"].items()))) == Sample(**FULL)
    nan = np.array([0xFFC00001], np.uint32).view(np.float32)[0]
    assert Sample(**FULL).replace(token_reward=[nan, 0, 0.5, 0]) == Sample(**FULL)
    assert Sample(**SAMPLE) != "2"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Sample(**SAMPLE))


def test_a_sample_does_not_change() -> None:
    s = Sample(**SAMPLE)
    with pytest.raises(AttributeError):
        s.reward = 2.0  # type: ignore[misc]
    assert s.replace(reward=2.0).reward == 2.0
    with pytest.raises(Refused, match="finite"):
        s.replace(reward=NAN)


def test_batch_defaults() -> None:
    b = Batch.of(**THREE)
    assert b.mask.dtype == torch.bool
    assert b.reward.dtype == b.weight.dtype == b.staleness.dtype == torch.float64
    assert b.weight.tolist() == [1, 1, 1]
    assert b.staleness.isnan().all()
    assert (b.role, b.ids) == (("policy",) * 3, ("row 0 (group a)", "row 1 (group a)", "row 2 (group b)"))
    assert (b.group.tolist(), b.group_names, b.n_groups) == ([0, 0, 1], ("a", "b"), 2)
    assert b.response.tolist() == [0, 1, 2]
    unknown = ("ref_logp", "behavior_logp", "old_logp", "pairs", "votes", "tokens", "lengths")
    assert [getattr(b, name) for name in unknown] == [None] * 7


@pytest.mark.parametrize(
    ("group", "index"),
    [
        (["b", "a", "b"], [0, 1, 0]),
        ([(1, 2), None, (1, 2)], [0, 1, 0]),
        ([1, "1", 1.0], [0, 1, 0]),
        (np.array([7, 7, 3]), [0, 0, 1]),
        (torch.tensor([7, 3, 7]), [0, 1, 0]),
    ],
    ids=str,
)
def test_groups_are_numbered_as_they_come(group: Any, index: list[int]) -> None:
    assert Batch.of(**{**THREE, "group": group}).group.tolist() == index


def test_unknown_is_nan() -> None:
    given = {**THREE, "reward": [None, 1, NAN], "staleness": [None, 0, 3]}
    b = Batch.of(**given, ref_logp=[None, [0, -1, -2], [NAN] * 3])
    assert b.reward.isnan().tolist() == b.ref_logp.isnan().all(1).tolist() == [True, False, True]
    assert b.staleness.isnan().tolist() == [True, False, False]
    assert b.staleness.tolist()[1:] == [0, 3]
    assert b.ref_logp[1].tolist() == [0, -1, -2]


def test_tensors_keep_their_dtype() -> None:
    zeros = torch.zeros(3, 3)
    b = Batch.of(**THREE, ref_logp=zeros, old_logp=zeros.long())
    assert (b.ref_logp.dtype, b.old_logp.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize(
    "mask", [[[0, 1, 1]] * 3, np.array([[0.0, 1.0, 1.0]] * 3), torch.tensor([[0, 1, 1]] * 3)]
)
def test_a_mask_of_zeros_and_ones(mask: Any) -> None:
    assert Batch.of(**{**THREE, "mask": mask}).mask.tolist() == [[False, True, True]] * 3


LENGTH = "expected 3 values, one a row, got"
HASHABLE = "expected hashable values, one a row"
NOT_NEGATIVE = "expected a finite number, 0 or more, got"
ROLE = "(group a): expected one of policy, log, expert, got 'teacher'"
OF_A_BATCH = [
    *cases(
        {
            "mask": [
                ([True, False], "expected shape [B,T], got [2]"),
                (np.zeros((0, 3)), "expected shape [B,T], got [0, 3]"),
                ([[False, True], [False]], "expected numbers, got"),
                (None, "expected numbers, got None"),
                ([[0, 1, 1], [0, 2, 0], [0, 0, 1]], "row 1: expected true and false, got [0, 2, 0]"),
                ([[0, 1, 1], [0, 1, 0], [0, NAN, 1]], "row 2: expected true and false, got [0.0, nan, 1.0]"),
                ([[0, 1, 1], [1, 1, 0], [0, 0, 1]], "row 1 (group a): the first token is in the mask"),
                ([[0, 1, 1], [0, 1, 0], [0, 0, 0]], "row 2 (group b) is empty"),
            ],
            "group": [
                (["a", "b"], f"{LENGTH} 2"),
                (None, f"{HASHABLE}, got None"),
                ([["a"], ["a"], ["b"]], f"{HASHABLE}, got [['a'], ['a'], ['b']]"),
                (np.zeros((3, 1)), HASHABLE),
            ],
            "response": [([0], f"{LENGTH} 1"), ([0, {}, 1], HASHABLE)],
            "ids": [(["x"], f"{LENGTH} 1")],
            "reward": [
                ([1.0, 2.0], "expected shape [3], got [2]"),
                ([[1.0], [2.0], [3.0]], "expected shape [3], got [3, 1]"),
                (["a", "b", "c"], "expected numbers of shape [3], got ['a', 'b', 'c']"),
                (None, "expected shape [3], got []"),
                (
                    [1, INF, 0],
                    "row 1 (group a): expected a finite number, or NaN where it is unknown, got inf",
                ),
            ],
            "weight": [
                ([1.0], "expected shape [3], got [1]"),
                ([1, 1, -0.5], f"row 2 (group b): {NOT_NEGATIVE} -0.5"),
                ([1, NAN, 1], f"row 1 (group a): {NOT_NEGATIVE} nan"),
                ([INF, 1, 1], f"row 0 (group a): {NOT_NEGATIVE} inf"),
            ],
            "staleness": [
                ([0, 1], "expected shape [3], got [2]"),
                (0, "expected shape [3], got []"),
                (["new"] * 3, "expected numbers of shape [3]"),
            ],
            "role": [
                (["log", "teacher", "log"], f"row 1 {ROLE}"),
                ("teacher", f"row 0 {ROLE}"),
                (["log"], f"{LENGTH} 1"),
            ],
            "ref_logp": [
                ([[0, -1, -1]] * 2, "expected shape [3, 3], got [2, 3]"),
                ([0, -1, -1], "expected shape [3, 3], got [3]"),
            ],
            "behavior_logp": [([[0, -1, -1]] * 2 + [[0, -1]], "expected numbers of shape [3, 3]")],
            "old_logp": [
                (torch.zeros(3, 2), "expected shape [3, 3], got [3, 2]"),
                (0.5, "expected shape [3, 3], got []"),
            ],
            "pairs": [
                ([[0, 1, 2], [2, 1, 0]], "expected shape [P,2], got [2, 3]"),
                ([0, 1], "expected shape [P,2], got [2]"),
                ([[0, 1], [2, 3]], "pair 1: expected rows 0 to 2, got [2, 3]"),
                ([[-1, 1]], "pair 0: expected rows 0 to 2, got [-1, 1]"),
            ],
            "votes": [([[1, 0]], "expected shape [0, 2], got [1, 2]")],
            "tokens": [([[1, 2]], "expected shape [3, 3], got [1, 2]")],
            "lengths": [([3, 3], "expected shape [3], got [2]")],
        }
    ),
    ({"mask": [[0, 1, 1], [0, 1, 0], [0, 0, 0]], "ids": ["x", "y", "z"]}, "mask: z is empty"),
    ({"pairs": [[0, 1]], "votes": [[1, 0], [1, 0]]}, "votes: expected shape [1, 2], got [2, 2]"),
    (
        {"pairs": [[0, 1]] * 2, "votes": [[1, NAN], [-1, 0]]},
        "votes: pair 1: expected 0 or more, or NaN where unknown, got [-1.0, 0.0]",
    ),
    ({"pairs": [[0, 1]], "votes": [[1, INF]]}, "votes: pair 0: expected 0 or more"),
    ({"extra": {"trace": "text"}}, "extra trace: expected numbers, got 'text'"),
    *(
        (
            {name: [None, [9.0, 0.0, 0.5], [0.0, -1.0, 0.5]]},
            f"{name}: row 1 (group a), index 2: expected a log-prob (at most 0; NaN where unknown), got 0.5",
        )
        for name in ("ref_logp", "behavior_logp", "old_logp")
    ),
]


@pytest.mark.parametrize(("changes", "words"), OF_A_BATCH, ids=str)
def test_what_a_batch_refuses(changes: dict[str, Any], words: str) -> None:
    assert words in refused(Batch.of, **{**THREE, **changes})


@pytest.mark.parametrize("field", ["ref_logp", "behavior_logp", "old_logp"])
def test_a_positive_log_prob_outside_of_the_mask_is_no_mistake(field: str) -> None:
    batch = Batch.of(**THREE, **{field: [[9.0, -1.0, 0.0], [9.0, 9.0, -1.0], None]})
    assert getattr(batch, field)[batch.mask].tolist()[:3] == [-1.0, 0.0, -1.0]


TENSORS = ("mask", "reward", "group", "response", "weight", "ref_logp", "pairs", "votes", "tokens", "lengths")


def whole() -> Batch:
    return Batch.of(
        mask=[[False, True, True]] * 5,
        reward=[0, 1, 2, 3, 4],
        group=["a", "b", "a", "c", "b"],
        response=[0, 1, 2, 3, 1],
        ref_logp=[[0, -i, -i] for i in range(5)],
        staleness=[0, 1, 2, 3, NAN],
        role=["log", "policy", "log", "expert", "policy"],
        weight=[1, 2, 1, 3, 2],
        pairs=[[0, 2], [1, 3], [0, 1], [4, 1], [3, 2]],
        votes=[[5, 1], [2, 2], [9, 9], [3, 0], [8, 8]],
        extra={"gap": [9, 8, 7, 6, 5], "step": 3, "edges": [0.5, 1.5]},
        tokens=[[i, i, i] for i in range(5)],
        lengths=[3, 3, 3, 2, 3],
        ids=list("vwxyz"),
    )


def test_rows_of_a_batch_are_numbered_anew() -> None:
    """A pair that loses a row leaves with it."""
    b = whole().rows(torch.tensor([4, 1, 3]))
    expected = {
        "group": [0, 0, 1],
        "response": [0, 0, 1],
        "reward": [4, 1, 3],
        "weight": [2, 2, 3],
        "ref_logp": [[0, -4, -4], [0, -1, -1], [0, -3, -3]],
        "tokens": [[4] * 3, [1] * 3, [3] * 3],
        "lengths": [3, 3, 2],
        "pairs": [[1, 2], [0, 1]],
        "votes": [[2, 2], [3, 0]],
    }
    assert {name: getattr(b, name).tolist() for name in expected} == expected
    assert (b.group_names, b.role, b.ids) == (("b", "c"), ("policy", "policy", "expert"), ("z", "w", "y"))
    assert b.staleness[0].isnan()
    assert b.staleness.tolist()[1:] == [1, 3]
    assert [torch.as_tensor(b.extra[name]).tolist() for name in ("gap", "step", "edges")] == [
        [5, 8, 6],
        3,
        [0.5, 1.5],
    ]
    assert b.behavior_logp is None


def test_all_rows_of_a_batch_are_the_batch() -> None:
    a = whole()
    b = a.rows(torch.arange(5))
    assert (a.group_names, a.ids, a.role) == (b.group_names, b.ids, b.role)
    for name in TENSORS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_to_moves_every_tensor() -> None:
    """On torch's meta device, which holds shapes alone."""
    moved = whole().to("meta")
    assert {getattr(moved, n).device.type for n in (*TENSORS, "staleness")} == {"meta"}
    assert {v.device.type for v in moved.extra.values()} == {"meta"}


def test_a_sample_of_fields_is_that_of_the_constructor() -> None:
    fields: dict[str, Any] = {**TOKENS, "behavior_logp": [0, 0, -1, -2]}
    made, other = Sample.of(fields), Sample.of({"prompt": "Q", "response": "A"})
    assert made == Sample(**fields)
    assert vars(made).keys() == vars(Sample(**fields)).keys()
    assert other == Sample("Q", "A")
    assert made.meta is not other.meta  # each has its own
    with pytest.raises(Refused, match="response: expected text"):
        Sample.of({"prompt": "Q", "response": None})


VALID: list[dict[str, Any]] = [
    {},
    {"prompt": [{"role": "user", "content": "Q"}]},
    {"prompt_id": ""},
    {"reward": 1},
    {"version": np.array([0, 1, 1], np.int32)},
    {"learn": np.array([False, False, True])},
    {"tokens": [1, 2, 3]},
    {"tokens": None, "action": None, "behavior_logp": None},
]


def row_of_a_store(**changes: Any) -> dict[str, Any]:
    """Its arrays are of the very types, and can't be written to."""
    fields: dict[str, Any] = {"prompt": "Q", "response": "A", "prompt_id": "q", "reward": 1.0, "version": 3}
    fields["tokens"] = np.array([1, 2, 3], np.int32)
    fields["action"] = np.array([False, True, True])
    fields["behavior_logp"] = np.array([np.nan, -0.5, -1.0], np.float32)
    fields |= changes
    for value in fields.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return fields


def test_samples_of_rows_are_those_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = [Sample.of(row_of_a_store(**changes)) for changes in VALID]
    assert Sample.all_of(row_of_a_store(**changes) for changes in VALID) == one_by_one
    assert Sample.all_of([]) == []
    looks: list[int] = []
    array = sample._ARRAYS["behavior_logp"]
    counted = array._replace(is_bad=lambda x: looks.append(len(x)) or x > 0)
    monkeypatch.setitem(sample._ARRAYS, "behavior_logp", counted)
    Sample.all_of([row_of_a_store(), row_of_a_store(**VALID[1]), row_of_a_store(**VALID[-1])])
    assert looks == [6]  # one look at the values of two of them


def test_calls_that_are_messages_of_their_own_belong_to_their_turn() -> None:
    """ms-swift writes a role "tool_call", LLaMA-Factory "function_call" and "observation"."""
    call, other = '{"name": "weather", "arguments": {"town": "Rome"}}', '{"name": "time", "arguments": "{}"}'
    messages = normalized(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "Let me see."},
            {"role": "tool_call", "content": call},
            {"role": "function_call", "content": other},
            {"role": "tool_response", "content": "sunny"},
            {"role": "observation", "content": {"hour": 9}},
            {"role": "assistant", "content": "Sunny."},
        ],
        "prompt",
    )
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1]["content"] == "Let me see."
    assert [c["function"] for c in messages[1]["tool_calls"]] == [
        {"name": "weather", "arguments": {"town": "Rome"}},
        {"name": "time", "arguments": {}},
    ]
    assert [m["content"] for m in messages[2:4]] == ["sunny", '{"hour": 9}']
    with pytest.raises(Refused, match=r"prompt\[0\].tool_calls\[0\]: expected a call of a tool"):
        normalized([{"role": "tool_call", "content": "weather in Rome"}], "prompt")


@pytest.mark.parametrize(
    "empty", [{"tool_calls": None}, {"tool_calls": []}, {"name": None}, {"reasoning_content": ""}]
)
def test_a_key_without_a_value_makes_no_other_prompt(empty: dict[str, Any]) -> None:
    """As `model_dump()` of a client's message writes them: the same prompt, so of the same group."""
    asked = [{"role": "user", "content": "A color?"}, {"role": "assistant", "content": "Blue?"}]
    assert normalized([message | empty for message in asked], "prompt") == asked
