"""Logs into the store: what is taken, what is refused and where, and the two real logs."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from making import sample
from making import write_lines as write

from agro.errors import Refused
from agro.logs.importing import LISTED, import_files
from agro.logs.mapping import parse_map
from agro.store import Pair, Store, write_samples

DATA = Path(__file__).parents[2] / "../shared/data"


def record(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Q", "response": "A", **fields}


def test_interchange_records(into: Store, load: Any) -> None:
    report = load(
        record(reward=True, model="gpt", answer="18", level=3),
        record(reward=0.25, prompt_id=7, source="s", role="expert", version=4),
        record(tokens=[1, 2], mask=[0, 1], behavior_logp=[None, -0.5]),
    )
    numbers = "pairs ties cut duplicates replaced forgotten tokens_dropped refused_count"
    counts = "unseen unknown_ends without_value before repeated dropped redacted left_out encodings"
    empty = dict.fromkeys(numbers.split(), 0) | {name: {} for name in counts.split()}
    empty |= {"columns_left": [], "unused": [], "refused": [], "normalized": "", "lower_is_better": False}
    empty |= {"absent": "", "wordless": False}
    found = {"samples": 3, "groups": 2, "scored": 2, "repeats": 1, "recognized": "interchange records"}
    assert report.to_json() == {**empty, **found}
    a, b, c = into.samples()
    assert (a.reward, a.source, a.role, a.meta) == (1.0, "gpt", "log", {"answer": "18", "level": 3})
    assert (b.reward, b.source, b.role, b.prompt_id, b.version) == (0.25, "s", "expert", "7", 4)
    assert (c.reward, c.source, c.knows_behavior) == (None, "file:log.jsonl", True)


def test_preference_records(into: Store, load: Any) -> None:
    row = {"prompt": "Q", "chosen": "a", "rejected": "b", "votes_chosen": 3, "votes_rejected": 1}
    rows = ({**row, "model": "m"}, {"prompt": "Q", "chosen": "c", "rejected": "a"}, record(reward=1))
    report = load(*rows)
    assert (report.samples, report.groups, report.pairs, report.repeats) == (5, 1, 2, 1)
    assert report.recognized == "interchange records and preference records"
    a, b, c, d, _ = into.samples()
    assert [s.response for s in (a, b, c, d)] == ["a", "b", "c", "a"]
    assert (a.source, a.reward, a.meta) == ("m", None, {})
    assert list(into.pairs()) == [Pair(a.id, b.id, 3, 1), Pair(c.id, d.id)]
    again = load(*rows)
    assert (again.samples, again.pairs, again.duplicates) == (0, 0, 5)
    assert len(list(into.pairs())) == 2


def test_preferences_by_columns_of_other_names(into: Store, load: Any) -> None:
    mapping = {"prompt": "q", "chosen": "better", "rejected": "worse"}
    report = load({"q": "Q", "better": ["a", "b"], "worse": ["c", "d"]}, mapping=mapping)
    assert (report.samples, report.pairs) == (4, 2)
    assert [s.response for s in into.samples()] == ["a", "c", "b", "d"]


def test_the_format_can_be_named(into: Store, load: Any) -> None:
    both = {"prompt": "Q", "response": "x", "chosen": "a", "rejected": "b"}
    assert load(both, format="preference").pairs == 1
    load({**both, "z": 1}, name="another.jsonl", format="interchange")
    assert list(into.samples())[-1].meta == {"chosen": "a", "rejected": "b", "z": 1}
    with pytest.raises(
        Refused, match=r"--format prefrence: unknown; did you mean preference\? One of your own is FILE\.toml"
    ):
        load(both, format="prefrence")


PAIR = {"prompt": "Q", "chosen": "A", "rejected": "B"}
BAD_ROWS = [
    ("{not json", "expected one JSON object a line"),
    ("[1, 2]", "got [1, 2]"),
    ("[" * 100_000, "expected one JSON object a line"),
    ('{"prompt": "Q", "response": "\udcff"}', "can't decode byte 0xff"),  # written as this byte
    ('{"prompt": "Q", "response": "A", "reward": NaN}', "NaN isn't JSON"),
    ('{"prompt": "Q", "response": "A", "reward": 1e999}', "1e999 is too large for a float"),
    ('{"prompt": "Q", "response": "A", "reward": 1, "reward": 0}', "'reward' twice"),
    (record(response=None), "response: expected text, got null"),
    ({"response": "A"}, "prompt: missing; name its column with --map"),
    ({"prompt": "Q", "output": "A"}, "name that of the responses with --map response=COLUMN"),
    (PAIR | {"rejected": None}, "rejected: expected text, got null"),
    (PAIR | {"votes_chosen": -1}, "votes_chosen: expected a number of 0 or more"),
    (record(role="boss"), "role: expected one of"),
]


def test_bad_rows_are_named_and_the_others_taken(into: Store, load: Any, tmp_path: Path) -> None:
    report = load(record(reward=1), "", *(row for row, _ in BAD_ROWS), record(reward=0))
    assert report.samples == into.counts().samples == 2
    log = tmp_path / "log.jsonl"
    assert [r.where for r in report.refused] == [f"{log}:{i + 3}" for i in range(len(BAD_ROWS))]
    for refusal, (_, reason) in zip(report.refused, BAD_ROWS, strict=True):
        assert reason in refusal.reason
    assert report.to_json()["refused"][0]["where"] == f"{log}:3"


def test_a_table_of_another_program(into: Store, load: Any) -> None:
    """A reward that is NaN is unknown; of meta it can't be. What no field takes of bytes is left out, and a
    column overrides no other one."""
    row = record(prompt=[{"role": "user", "content": "Q"}], reward=1.5, meta={"x": 1}, level=2.0, blob=None)
    row["exact"] = '{"reward": 0.0, "response": "B"}'
    changes = [{}, {"response": None}, {"level": math.nan}, {"blob": b"x"}, {"reward": math.nan}]
    rows = [row | change for change in changes]
    report = load(*rows, name="log.parquet")
    first, of_bytes, unknown = into.samples()
    assert (first.prompt, first.response, first.reward) == (row["prompt"], "A", 1.5)
    meta = {"x": 1, "level": 2, "exact": {"reward": 0.0, "response": "B"}}
    assert [s.meta for s in (first, of_bytes, unknown)] == [
        meta | {"blob": None},
        meta,
        meta | {"blob": None},
    ]
    assert unknown.reward is None
    assert "blob" in str(report)
    assert [r.where.rpartition(":")[2] for r in report.refused] == ["2", "3"]
    assert report.refused[1].reason.startswith("meta: expected a value that JSON has")
    assert load(*rows, name="log.parquet").duplicates == 3


def test_one_bad_response_of_a_row_is_named(load: Any) -> None:
    report = load({"prompt": "Q", "rs": ["a", None, "c"], "reward": [1, 0, "x"]}, mapping={"response": "rs"})
    assert report.samples == 1
    assert [(r.where[-2:], r.reason.split(",")[0]) for r in report.refused] == [
        (":1", "rs[1]: response: expected text"),
        (":1", "rs[2]: reward: expected a finite number"),
    ]


def test_where_nothing_can_be_used_nothing_is_said_to_be_done(into: Store, load: Any) -> None:
    with pytest.raises(Refused, match=r"all records are refused \(2\)[^$]*log\.jsonl:1: expected a format"):
        load({"x": 1}, {"x": 2})
    with pytest.raises(Refused, match=r"empty: expected records, got none"):
        load(name="empty")
    with pytest.raises(Refused, match="expected records, got none"):
        import_files(into, [])


def test_a_file_that_can_not_be_read_stops_all_before_anything_is_taken(into: Store, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", record())
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(record()).encode() * 99)[:-9])
    for bad, reason in (("missing.jsonl", "No such file"), ("cut.jsonl.gz", "cut off or damaged")):
        with pytest.raises(Refused, match=reason):
            import_files(into, [good, tmp_path / bad])
    assert into.counts().samples == 0


def test_a_second_import_brings_nothing_and_says_so(into: Store, load: Any, tmp_path: Path) -> None:
    rows = [record(response=str(i)) for i in range(1200)]
    assert load(*rows, limit=700).samples == 700
    rest = load(*rows)
    assert (rest.samples, rest.duplicates) == (500, 700)
    path, copy = tmp_path / "log.jsonl", tmp_path / "copy.gz"
    copy.write_bytes(gzip.compress(path.read_bytes()))
    again = import_files(into, [copy, path])
    assert (again.samples, again.groups, again.duplicates) == (0, 0, 2400)
    assert "not taken again: 2400 samples" in str(again)
    assert into.counts().samples == 1200
    with pytest.raises(Refused, match="limit: expected 1 or more rows, got 0"):
        load(*rows, limit=0)


def test_equal_responses_are_kept_and_counted(into: Store, load: Any) -> None:
    into.append([sample("Q", "A")])
    report = load(record(), record(), record(response="B"), record(prompt="other"))
    assert (report.samples, report.repeats, into.counts().samples) == (4, 2, 5)


def test_prompts_from_a_file_of_their_own(into: Store, load: Any, tmp_path: Path) -> None:
    prompts = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "one?", "prompt_id": "1", "answer": "1", "level": 1},
        {"prompt": [{"role": "user", "content": "two?"}], "id": 2, "answer": "2"},
    )
    report = load(
        {"prompt_id": 1, "response": "a"},
        {"id": 2, "response": "b"},
        {"prompt_id": "3", "response": "c"},
        {"prompt": "own", "prompt_id": "4", "response": "d"},
        {"prompt_id": "1", "response": "e", "answer": "uno", "level": 9, "meta": {"x": 1}},
        prompts=prompts,
    )
    assert [(s.prompt, s.prompt_id, s.meta) for s in into.samples()] == [
        ("one?", "1", {"answer": "1", "level": 1}),
        ([{"role": "user", "content": "two?"}], "2", {"answer": "2"}),
        ("own", "4", {}),
        ("one?", "1", {"answer": "uno", "level": 9, "x": 1}),
    ]
    [refusal] = report.refused
    assert refusal.where.endswith(":3")
    assert refusal.reason == "prompt_id: the file of prompts has no '3'"


def test_one_prompt_id_names_one_prompt(into: Store, load: Any, tmp_path: Path) -> None:
    """Of two files numbered from 0 the second is refused, with both texts, the ids and the way out."""
    first = write(tmp_path / "a.jsonl", *[record(prompt="1+1=", prompt_id=0)] * 2)
    second = write(
        tmp_path / "b.jsonl", record(prompt="2+2=", prompt_id=0), record(prompt="2+2=", prompt_id=1)
    )
    report = import_files(into, [first, second])
    assert (report.samples, report.groups) == (3, 2)
    (refusal,) = report.refused
    assert refusal.where == f"{second}:1"
    said = r"0 to name one prompt, '1\+1=' \(sample 1, of file:a.jsonl\), got '2\+2='.*leave prompt_id out"
    assert re.search(said, refusal.reason)
    assert {s.prompt for s in into.samples(prompt_id="0")} == {"1+1="}
    with pytest.raises(Refused, match=r"log\.jsonl:1: prompt_id: .*'1\+1=' \(sample 1, .*got '3\+3='"):
        load(record(prompt="3+3=", prompt_id=0))
    assert import_files(into, [first]).duplicates == 2


def test_prompts_under_one_id_are_shown_from_where_they_differ(load: Any) -> None:
    """The rows are of a preference file."""
    rows = [PAIR | {"prompt": "x" * 500 + end, "prompt_id": "p"} for end in ("first", "second")]
    report = load(*rows)
    assert (report.samples, report.pairs) == (2, 1)
    (refusal,) = report.refused
    assert f"'…{'x' * 20}first'" in refusal.reason
    assert f"'…{'x' * 20}second'" in refusal.reason


def test_an_export_imported_twice_or_into_its_own_store(into: Store, tmp_path: Path) -> None:
    into.append([sample(response=str(i)) for i in range(3)])
    write_samples(tmp_path / "x.jsonl", into.samples())
    assert (import_files(into, [tmp_path / "x.jsonl"]).repeats, into.counts().samples) == (3, 6)
    assert import_files(into, [tmp_path / "x.jsonl"]).duplicates == 3


def test_columns_that_a_mapping_leaves_behind_are_named(into: Store, load: Any) -> None:
    row = {"prompt": "Q", "out": "A"}
    report = load(row | {"id": 1}, row | {"note": 1}, mapping={"response": "out"})
    assert list(report.columns_left) == ["id", "note"]
    assert "columns without --map, dropped: id, note" in str(report)
    assert next(into.samples()).meta == {}


has_data = pytest.mark.skipif(not DATA.exists(), reason="the real logs (../shared/data) aren't here")


@has_data
def test_the_logged_answers_of_four_models(into: Store) -> None:
    maps = ["prompt=question", "answer=ground_truth", "response=*.solution", "reward=*.is_correct"]
    log = DATA / "generations/gsm8k_openai_6b_175b.jsonl.gz"
    report = import_files(into, [log], mapping=parse_map(maps))
    assert (report.samples, report.groups, report.scored, report.refused) == (5276, 1319, 5276, [])
    assert {g.size for g in into.groups()} == {4}
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    assert into.counts().sources == dict.fromkeys(models, 1319)
    rows = [json.loads(line) for line in gzip.decompress(log.read_bytes()).splitlines()]
    right = Counter(s.source for s in into.samples() if s.reward == 1.0)
    assert right == {m: sum(row[m]["is_correct"] for row in rows) for m in models}
    first = next(into.samples(prompt_id=into.groups()[0].prompt_id))
    assert first.meta == {"answer": rows[0]["ground_truth"]}


@has_data
def test_the_logged_answers_to_game_24(into: Store) -> None:
    """100 puzzles, 100 responses each, mean reward 0.0403; 51 groups whose rewards are all equal."""
    mapping = parse_map(["prompt=puzzle", "response=responses", "reward=rewards"])
    report = import_files(into, [DATA / "game24/game24_gpt4_cot_100x100.jsonl.gz"], mapping=mapping)
    assert (report.samples, report.groups, report.scored, report.refused) == (10_000, 100, 10_000, [])
    groups = into.groups()
    assert {g.size for g in groups} == {100}
    assert sum(g.reward_min == g.reward_max for g in groups) == 51
    assert sum(s.reward or 0 for s in into.samples()) == 403


def test_of_many_refusals_all_are_in_a_file(load: Any) -> None:
    report = load(record(), *[record(response=None)] * (LISTED + 2))
    assert (report.samples, report.refused_count, len(report.refused)) == (1, LISTED + 2, LISTED)
    lines = Path(report.refused_file).read_text().splitlines()
    assert len(lines) == LISTED + 2
    assert json.loads(lines[-1])["where"].endswith(f"log.jsonl:{LISTED + 3}")
    assert report.refused_file in str(report)


def test_the_reward_is_a_sum_of_any_columns(into: Store, load: Any) -> None:
    load(record(reward=9, A=1, B=0.5), record(response="B", A=1, B=None), rewards={"A": 0.5, "B": 2.0})
    load("prompt,response,A", "Q,C,0.25", name="log.csv", rewards={"A": 1.0})
    dump = {"input": "Q", "output": "D", "gts": "1", "score": 1.0, "acc": 0.5, "step": 1}
    load(dump, name="verl.jsonl", rewards={"acc": 1.0})
    assert [s.reward for s in into.samples()] == [1.5, None, 0.25, 0.5]  # None: of an unknown part


RATED = record(reward=1, A=2)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (RATED, {"rewards": {"C": 1.0}}, "--reward C: no such column; there are prompt, response, reward, A"),
        (
            RATED,
            {"rewards": {"A": 1}, "mapping": {"reward": "A"}},
            "--map reward=… and --reward: .* give one",
        ),
        (RATED, {"choose": {"filter": "x"}}, "--choose filter: no such choice for agro's interchange record"),
        (PAIR | {"score": 1}, {"rewards": {"score": 1.0}}, "--reward: the record is a pair"),
        (PAIR | {"reward": 1.0}, {}, r"two responses, and one reward, 1\.0"),
    ],
)
def test_a_choice_that_a_format_does_not_have(
    row: dict[str, Any], options: Any, message: str, load: Any
) -> None:
    with pytest.raises(Refused, match=message):
        load(row, **options)


def test_a_reward_of_two_responses_may_be_meta(load: Any) -> None:
    assert load(PAIR | {"reward": 1.0}, mapping=parse_map(["meta.reward=reward"])).pairs == 1


def test_files_that_are_no_logs_are_named(into: Store, tmp_path: Path) -> None:
    Store.open(tmp_path / "other.db").close()
    for name, content, message in (
        ("wide.jsonl", json.dumps(record()).encode("utf-16"), "expected UTF-8, got UTF-16"),
        ("logs.jsonl", b"PK\x03\x04", "got a zip file; the name of an Excel file ends in .xlsx"),
        ("table.xlsx", b"PK\x03\x04", "can't be read as Excel"),
        (
            "other.db",
            None,
            "expected a log, got a store or another database of several tables; .*agro export",
        ),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(Refused, match=message):
            import_files(into, [tmp_path / name])


def test_a_log_that_grew_says_that_it_was_imported_before(load: Any) -> None:
    assert not load(record(reward=1)).before
    longer = (record(reward=1), record(response="B"))
    report = load(*longer)
    assert (report.samples, report.before) == (2, {"log.jsonl": 1})
    assert "log.jsonl: another file of this name was imported before (1 samples)" in str(report)
    assert not load(*longer).before


COMPARED = {"context": [{"role": "user", "content": "2+2?"}], "response1": "4", "response2": "5"}
CHOSEN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
REJECTED = [CHOSEN[0], {"role": "assistant", "content": "5"}]
TIES: list[dict[str, Any]] = [
    {**PAIR, "votes_chosen": 3, "votes_rejected": 3},
    {**PAIR, "score_chosen": 0.5, "score_rejected": 0.5},
    {"chosen": CHOSEN, "rejected": REJECTED, "score_chosen": 7.0, "score_rejected": 7.0},
    {"question": "Q", "chosen": "A", "rejected": "B", "chosen-rating": 4, "rejected-rating": 4},
    {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"}}
    | {"rejected": {"from": "gpt", "value": "B"}, "chosen_score": 1, "rejected_score": 1},
    {**COMPARED, "overall_preference": 0},
    {**COMPARED, "overall_preference": 0, "individual_preference": [{"score": s} for s in (-2, 1, 1)]},
    {"prompt": "Q", "prompt_id": "q", "chosen": CHOSEN, "rejected": REJECTED, "messages": CHOSEN}
    | {"score_chosen": 8.0, "score_rejected": 8.0},
    {"prompt": '["Q"]', "response_a": '["A"]', "response_b": '["B"]'}
    | {"winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1},
]


@pytest.mark.parametrize("row", TIES, ids=lambda row: ",".join(row)[:40])
def test_a_tie_has_no_winner(row: dict[str, Any], into: Store, load: Any) -> None:
    report = load(row)
    assert (report.samples, report.pairs, report.ties) == (2, 0, 1)
    [pair] = into.pairs()
    assert pair.is_tie


CALL_OF_A_MODEL = {
    "request": {"messages": [{"role": "user", "content": "q"}]},
    "response": {"choices": [{"message": {"role": "assistant", "content": "a"}}]},
    "reward": 1.0,
}


@pytest.mark.parametrize(
    ("row", "column"),
    [(record(rating="4/5"), "rating"), (record(rating="★★☆☆☆"), "rating"), (CALL_OF_A_MODEL, "reward")],
)
def test_what_may_rate_and_is_not_taken_is_named(load: Any, row: dict[str, Any], column: str) -> None:
    report = load(row)
    assert (report.samples, report.scored, report.unused) == (1, 0, [column])
