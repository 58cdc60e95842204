"""Logs into the store: what is taken, what is refused and where, and the two real logs."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from making import sample
from making import write_lines as write
from pyarrow import parquet

from agro.errors import Refused
from agro.logs.importing import LISTED, import_files
from agro.logs.mapping import parse_map
from agro.store import Pair, Store, write_samples

DATA = Path(__file__).parents[2] / "../shared/data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def record(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Q", "response": "A", **fields}


def test_interchange_records(into: Store, folder: Path) -> None:
    path = write(
        folder / "log.jsonl",
        record(reward=True, model="gpt", answer="18", level=3),
        record(reward=0.25, prompt_id=7, source="s", role="expert", version=4),
        record(tokens=[1, 2], mask=[0, 1], behavior_logp=[None, -0.5]),
    )
    report = import_files(into, [path])
    numbers = "pairs ties cut duplicates replaced forgotten tokens_dropped refused_count"
    counts = "unknown_ends without_column before repeated dropped redacted left_out encodings"
    empty = dict.fromkeys(numbers.split(), 0) | {name: {} for name in counts.split()}
    empty |= {"columns_left": [], "unused": [], "refused": [], "normalized": "", "lower_is_better": False}
    found = {"samples": 3, "groups": 2, "scored": 2, "repeats": 1, "recognized": "interchange records"}
    assert report.to_json() == {**empty, **found}
    a, b, c = into.samples()
    assert (a.reward, a.source, a.role, a.meta) == (1.0, "gpt", "log", {"answer": "18", "level": 3})
    assert (b.reward, b.source, b.role, b.prompt_id, b.version) == (0.25, "s", "expert", "7", 4)
    assert (c.reward, c.source, c.knows_behavior) == (None, "file:log.jsonl", True)


def test_preference_records(into: Store, folder: Path) -> None:
    row = {"prompt": "Q", "chosen": "a", "rejected": "b", "votes_chosen": 3, "votes_rejected": 1}
    other = {"prompt": "Q", "chosen": "c", "rejected": "a"}
    path = write(folder / "x.jsonl", {**row, "model": "m"}, other, record(reward=1))
    report = import_files(into, [path])
    assert (report.samples, report.groups, report.pairs, report.repeats) == (5, 1, 2, 1)
    assert report.recognized == "interchange records and preference records"
    a, b, c, d, _ = into.samples()
    assert [s.response for s in (a, b, c, d)] == ["a", "b", "c", "a"]
    assert (a.source, a.reward, a.meta) == ("m", None, {})
    assert list(into.pairs()) == [Pair(a.id or 0, b.id or 0, 3, 1), Pair(c.id or 0, d.id or 0)]
    again = import_files(into, [path])
    assert (again.samples, again.pairs, again.duplicates) == (0, 0, 5)
    assert len(list(into.pairs())) == 2


def test_preferences_by_columns_of_other_names(into: Store, folder: Path) -> None:
    path = write(folder / "x.jsonl", {"q": "Q", "better": ["a", "b"], "worse": ["c", "d"]})
    report = import_files(into, [path], mapping=parse_map(["prompt=q", "chosen=better", "rejected=worse"]))
    assert (report.samples, report.pairs) == (4, 2)
    assert [s.response for s in into.samples()] == ["a", "c", "b", "d"]


def test_the_format_can_be_named(into: Store, folder: Path) -> None:
    both = {"prompt": "Q", "response": "x", "chosen": "a", "rejected": "b"}
    assert import_files(into, [write(folder / "x", both)], format="preference").pairs == 1
    import_files(into, [write(folder / "y", {**both, "z": 1})], format="interchange")
    assert list(into.samples())[-1].meta == {"chosen": "a", "rejected": "b", "z": 1}
    with pytest.raises(Refused, match="--format prefrence: unknown; did you mean preference"):
        import_files(into, [], format="prefrence")


def test_bad_rows_are_named_and_the_others_taken(into: Store, folder: Path) -> None:
    path = write(
        folder / "x.jsonl",
        record(reward=1),
        "",
        "{not json",
        "[1, 2]",
        '{"prompt": "Q", "response": "A", "reward": NaN}',
        '{"prompt": "Q", "response": "A", "reward": 1e999}',
        '{"prompt": "Q", "response": "A", "level": Infinity}',
        record(reward="1"),
        record(response=None),
        {"response": "A"},
        {"prompt": "Q", "output": "A"},
        {"prompt": "Q", "chosen": "a", "rejected": None},
        {"prompt": "Q", "chosen": "a", "rejected": "b", "votes_chosen": -1},
        record(role="boss"),
        record(tokens=[1]),
        "[" * 100_000,
        record(reward=0),
    )
    path.write_bytes(path.read_bytes() + b'{"prompt": "Q", "response": "\xff"}\n')
    report = import_files(into, [path])
    assert report.samples == into.counts().samples == 2
    reasons = {r.where.removeprefix(f"{path}:"): r.reason for r in report.refused}
    expected = {
        "3": "expected one JSON object a line",
        "4": "got [1, 2]",
        "5": "NaN isn't JSON",
        "6": "1e999 is more than a float can be",
        "7": "Infinity isn't JSON",
        "8": "reward: expected a finite number",
        "9": "response: expected text, got null",
        "10": "prompt: missing; name its column with --map",
        "11": "name the one of the responses with --map response=COLUMN",
        "12": "rejected: expected text, got null",
        "13": "votes_chosen: expected a number of 0 or more",
        "14": "role: expected one of",
        "15": "tokens: without a mask",
        "16": "expected one JSON object a line",
        "18": "can't decode byte 0xff",
    }
    assert reasons.keys() == expected.keys()
    assert {k: v for k, v in expected.items() if v not in reasons[k]} == {}
    assert report.to_json()["refused"][0]["where"] == f"{path}:3"


def test_a_table_s_values_that_the_store_can_not_hold(into: Store, folder: Path) -> None:
    rows = [record(level=1.0, blob=None), record(level=math.nan, blob=None), record(level=1.0, blob=b"x")]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "x.parquet")
    report = import_files(into, [folder / "x.parquet"])
    assert report.samples == 2  # bytes that no field takes are left out, and counted by their column
    assert "blob" in str(report)
    assert [r.where[-2:] for r in report.refused] == [":2"]
    assert all(r.reason.startswith("meta: expected a value that JSON has") for r in report.refused)


def test_one_bad_response_of_a_row_is_named(into: Store, folder: Path) -> None:
    path = write(folder / "x.jsonl", {"prompt": "Q", "rs": ["a", None, "c"], "reward": [1, 0, "x"]})
    report = import_files(into, [path], mapping={"response": "rs"})
    assert report.samples == 1
    assert [(r.where, r.reason.split(",")[0]) for r in report.refused] == [
        (f"{path}:1", "rs[1]: response: expected text"),
        (f"{path}:1", "rs[2]: reward: expected a finite number"),
    ]


def test_where_nothing_can_be_used_nothing_is_said_to_be_done(into: Store, folder: Path) -> None:
    bad = write(folder / "bad.jsonl", {"x": 1}, {"x": 2})
    with pytest.raises(Refused, match=r"all records are refused \(2\)[^$]*bad\.jsonl:1: expected a format"):
        import_files(into, [bad])
    with pytest.raises(Refused, match=r"empty: expected records, got none"):
        import_files(into, [write(folder / "empty")])
    with pytest.raises(Refused, match="expected records, got none"):
        import_files(into, [])


def test_a_file_that_can_not_be_read_stops_all_before_anything_is_taken(into: Store, folder: Path) -> None:
    good = write(folder / "good.jsonl", record())
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(record()).encode() * 99)[:-9])
    for bad, reason in (("missing.jsonl", "No such file"), ("cut.jsonl.gz", "cut off or damaged")):
        with pytest.raises(Refused, match=reason):
            import_files(into, [good, folder / bad])
    assert into.counts().samples == 0


def test_a_second_import_brings_nothing_and_says_so(into: Store, folder: Path) -> None:
    path = write(folder / "x.jsonl", *(record(response=str(i)) for i in range(1200)))
    assert import_files(into, [path], limit=700).samples == 700
    rest = import_files(into, [path])
    assert (rest.samples, rest.duplicates) == (500, 700)
    copy = folder / "copy.gz"
    copy.write_bytes(gzip.compress(path.read_bytes()))
    again = import_files(into, [copy, path])
    assert (again.samples, again.groups, again.duplicates) == (0, 0, 2400)
    assert "not taken again: 2400 samples" in str(again)
    assert into.counts().samples == 1200


def test_equal_responses_are_kept_and_counted(into: Store, folder: Path) -> None:
    into.append([sample("Q", "A")])
    path = write(folder / "x.jsonl", record(), record(), record(response="B"), record(prompt="other"))
    report = import_files(into, [path])
    assert (report.samples, report.repeats, into.counts().samples) == (4, 2, 5)


def test_prompts_from_a_file_of_their_own(into: Store, folder: Path) -> None:
    prompts = write(
        folder / "prompts.jsonl",
        {"prompt": "one?", "prompt_id": "1", "answer": "1", "level": 1},
        {"prompt": [{"role": "user", "content": "two?"}], "id": 2, "answer": "2"},
    )
    log = write(
        folder / "log.jsonl",
        {"prompt_id": 1, "response": "a"},
        {"id": 2, "response": "b"},
        {"prompt_id": "3", "response": "c"},
        {"prompt": "own", "prompt_id": "4", "response": "d"},
        {"prompt_id": "1", "response": "e", "answer": "uno", "level": 9, "meta": {"x": 1}},
    )
    report = import_files(into, [log], prompts=prompts)
    a, b, d, e = into.samples()
    assert (a.prompt, a.prompt_id, a.meta) == ("one?", "1", {"answer": "1", "level": 1})
    assert b.prompt == [{"role": "user", "content": "two?"}]
    assert b.meta["answer"] == "2"
    assert (d.prompt, d.prompt_id, d.meta) == ("own", "4", {})
    assert e.meta == {"answer": "uno", "level": 9, "x": 1}
    assert [(r.where, r.reason) for r in report.refused] == [
        (f"{log}:3", "prompt_id: the file of prompts has no '3'")
    ]


def test_one_prompt_id_names_one_prompt(into: Store, folder: Path) -> None:
    """Of two files numbered from 0 the second is refused, with both texts, the ids and the way out."""
    first = write(folder / "a.jsonl", record(prompt="1+1=", prompt_id=0), record(prompt="1+1=", prompt_id=0))
    second = write(folder / "b.jsonl", record(prompt="2+2=", prompt_id=0), record(prompt="2+2=", prompt_id=1))
    report = import_files(into, [first, second])
    assert (report.samples, report.groups) == (3, 2)
    (refusal,) = report.refused
    assert refusal.where == f"{second}:1"
    said = r"0 to name one prompt, '1\+1=' \(sample 1, of file:a.jsonl\), got '2\+2='.*leave prompt_id out"
    assert re.search(said, refusal.reason)
    assert {s.prompt for s in into.samples(prompt_id="0")} == {"1+1="}
    later = write(folder / "c.jsonl", record(prompt="3+3=", prompt_id=0))
    with pytest.raises(Refused, match=r"c\.jsonl:1: prompt_id: .*'1\+1=' \(sample 1, .*got '3\+3='"):
        import_files(into, [later])
    assert import_files(into, [first]).duplicates == 2


def test_prompts_under_one_id_are_shown_from_where_they_differ(into: Store, folder: Path) -> None:
    texts = ["x" * 500 + end for end in ("first", "second")]
    path = write(folder / "x.jsonl", *(record(prompt=text, prompt_id="p") for text in texts))
    (refusal,) = import_files(into, [path]).refused
    assert f"'…{'x' * 20}first'" in refusal.reason
    assert f"'…{'x' * 20}second'" in refusal.reason


def test_rows_under_one_id_in_one_preference_file(into: Store, folder: Path) -> None:
    rows = [{"prompt": p, "prompt_id": "p", "chosen": "a", "rejected": "b"} for p in ("Q", "R")]
    report = import_files(into, [write(folder / "x.jsonl", *rows)])
    assert (report.samples, report.pairs, len(report.refused)) == (2, 1, 1)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"prompt": "Q", "response": "A", "version": []}', "version"),
        ('{"prompt": "Q", "response": "A", "meta": {"x": 1e999}}', "1e999"),
        ('{"prompt": "Q", "response": "A", "reward": 1, "reward": 0}', "'reward' twice"),
        ('{"prompt": "Q", "response": "A", "meta": {"x": 1, "x": 2}}', "'x' twice"),
        ('{"prompt": "Q", "response": "A", "version": true}', "version"),
        ('{"prompt": "Q", "response": "A", "tokens": [1, true], "mask": [0, 1]}', "tokens"),
        ('{"prompt": "Q", "chosen": "A", "rejected": "B", "votes_chosen": true}', "votes_chosen"),
    ],
)
def test_one_such_line_is_refused_and_the_others_are_taken(
    into: Store, folder: Path, line: str, field: str
) -> None:
    path = write(folder / "x.jsonl", record(), line, record())
    report = import_files(into, [path])
    assert report.samples == 2
    assert [(r.where, field in r.reason) for r in report.refused] == [(f"{path}:2", True)]


def test_a_column_named_exact_of_another_program_overrides_nothing(into: Store, folder: Path) -> None:
    row = record(reward=1.0, exact='{"reward": 0.0, "response": "B"}')
    parquet.write_table(pa.Table.from_pylist([row]), folder / "x.parquet")
    import_files(into, [folder / "x.parquet"])
    (s,) = into.samples()
    assert (s.reward, s.response, s.meta) == (1.0, "A", {"exact": {"reward": 0.0, "response": "B"}})


def test_parquet_of_another_program(into: Store, folder: Path) -> None:
    fields = {"reward": 1.5, "meta": {"x": 1}, "level": 2}
    rows = [
        {"prompt": [{"role": "user", "content": q}], "response": r} | fields for q, r in ("Qa", ("R", None))
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "x.parquet")
    report = import_files(into, [folder / "x.parquet"])
    (s,) = into.samples()
    assert (s.prompt, s.reward, s.meta) == ([{"role": "user", "content": "Q"}], 1.5, {"x": 1, "level": 2})
    assert [r.where for r in report.refused] == [f"{folder / 'x.parquet'}:2"]
    assert import_files(into, [folder / "x.parquet"]).duplicates == 1


def test_an_export_imported_twice_or_into_its_own_store(into: Store, folder: Path) -> None:
    into.append([sample(response=str(i)) for i in range(3)])
    write_samples(folder / "x.jsonl", into.samples())
    assert (import_files(into, [folder / "x.jsonl"]).repeats, into.counts().samples) == (3, 6)
    assert import_files(into, [folder / "x.jsonl"]).duplicates == 3


def test_columns_that_a_mapping_leaves_behind_are_named(into: Store, folder: Path) -> None:
    path = write(
        folder / "x.jsonl", {"prompt": "Q", "out": "A", "id": 1}, {"prompt": "Q", "out": "A", "note": 1}
    )
    report = import_files(into, [path], mapping={"response": "out"})
    assert list(report.columns_left) == ["id", "note"]
    assert "columns without --map, dropped: id, note" in str(report)
    assert next(into.samples()).meta == {}


def test_a_limit_counts_rows(into: Store, folder: Path) -> None:
    path = write(folder / "x.jsonl", *(record(response=str(i)) for i in range(9)))
    assert import_files(into, [path], limit=4).samples == 4
    with pytest.raises(Refused, match="limit: expected 1 or more rows, got 0"):
        import_files(into, [path], limit=0)


@pytest.mark.skipif(not DATA.exists(), reason="the real logs (../shared/data) aren't here")
def test_the_logged_answers_of_four_models(into: Store) -> None:
    mapping = parse_map(
        ["prompt=question", "answer=ground_truth", "response=*.solution", "reward=*.is_correct"]
    )
    report = import_files(into, [DATA / "generations/gsm8k_openai_6b_175b.jsonl.gz"], mapping=mapping)
    assert (report.samples, report.groups, report.scored, report.refused) == (5276, 1319, 5276, [])
    assert {g.size for g in into.groups()} == {4}
    assert into.counts().sources == dict.fromkeys(
        ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"), 1319
    )
    text = gzip.decompress((DATA / "generations/gsm8k_openai_6b_175b.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.strip().split("\n")]
    right = Counter(s.source for s in into.samples() if s.reward == 1.0)
    assert right == {m: sum(row[m]["is_correct"] for row in rows) for m in right}
    first = next(into.samples(prompt_id=into.groups()[0].prompt_id))
    assert first.meta == {"answer": rows[0]["ground_truth"]}


@pytest.mark.skipif(not DATA.exists(), reason="the real logs (../shared/data) aren't here")
def test_the_logged_answers_to_game_24(into: Store) -> None:
    """100 puzzles, 100 responses each, mean reward 0.0403; 51 groups whose rewards are all equal."""
    mapping = parse_map(["prompt=puzzle", "response=responses", "reward=rewards"])
    report = import_files(into, [DATA / "game24/game24_gpt4_cot_100x100.jsonl.gz"], mapping=mapping)
    assert (report.samples, report.groups, report.scored, report.refused) == (10_000, 100, 10_000, [])
    groups = into.groups()
    assert {g.size for g in groups} == {100}
    assert sum(g.reward_min == g.reward_max for g in groups) == 51
    assert sum(s.reward or 0 for s in into.samples()) == 403


def test_of_many_refusals_all_are_in_a_file(into: Store, folder: Path) -> None:
    rows = [record(response=None) for _ in range(LISTED + 2)]
    report = import_files(into, [write(folder / "x.jsonl", record(), *rows)])
    assert (report.samples, report.refused_count, len(report.refused)) == (1, LISTED + 2, LISTED)
    lines = Path(report.refused_file).read_text().splitlines()
    assert len(lines) == LISTED + 2
    assert json.loads(lines[-1])["where"] == f"{folder / 'x.jsonl'}:{LISTED + 3}"
    assert report.refused_file in str(report)


def test_the_reward_is_a_sum_of_any_columns(into: Store, folder: Path) -> None:
    path = write(folder / "log.jsonl", record(reward=9, A=1, B=0.5), record(response="B", A=1, B=None))
    import_files(into, [path], rewards={"A": 0.5, "B": 2.0})
    assert [sample.reward for sample in into.samples()] == [1.5, None]  # of an unknown part

    table = folder / "log.csv"
    table.write_text("prompt,response,A\nQ,C,0.25\n")
    import_files(into, [table], rewards={"A": 1.0})
    assert [sample.reward for sample in into.samples()][-1] == 0.25

    dump = {"input": "Q", "output": "D", "gts": "1", "score": 1.0, "acc": 0.5, "step": 1}
    import_files(into, [write(folder / "verl.jsonl", dump)], rewards={"acc": 1.0})
    assert [sample.reward for sample in into.samples()][-1] == 0.5


RATED = record(reward=1, A=2)
PAIR = {"prompt": "Q", "chosen": "A", "rejected": "B"}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (RATED, {"rewards": {"C": 1.0}}, "--reward C: no such column; there are prompt, response, reward, A"),
        (
            RATED,
            {"rewards": {"A": 1.0}, "mapping": {"reward": "A"}},
            "--map reward=… and --reward: .* give one",
        ),
        (RATED, {"choose": {"filter": "x"}}, "--choose filter: no such choice for agro's interchange record"),
        (PAIR | {"score": 1}, {"rewards": {"score": 1.0}}, "--reward: the record is a pair"),
        (PAIR | {"reward": 1.0}, {}, r"two responses, and one reward, 1\.0"),
    ],
)
def test_a_choice_that_a_format_does_not_have(
    row: dict[str, Any], options: Any, message: str, into: Store, folder: Path
) -> None:
    with pytest.raises(Refused, match=message):
        import_files(into, [write(folder / "log.jsonl", row)], **options)


def test_nan_of_a_table_is_an_unknown_reward(into: Store, folder: Path) -> None:
    rows = {"prompt": ["Q", "Q"], "response": ["A", "B"], "reward": [float("nan"), 1.0]}
    parquet.write_table(pa.table(rows), folder / "log.parquet")
    import_files(into, [folder / "log.parquet"])
    assert [sample.reward for sample in into.samples()] == [None, 1.0]


def test_files_that_are_no_logs_are_named(into: Store, folder: Path) -> None:
    (folder / "wide.jsonl").write_bytes(json.dumps(record()).encode("utf-16"))
    (folder / "logs.jsonl").write_bytes(b"PK\x03\x04")
    (folder / "table.xlsx").write_bytes(b"PK\x03\x04")
    with Store.open(folder / "other.db") as other:
        other.append([sample()])
    for name, message in (
        ("wide.jsonl", "expected UTF-8, got UTF-16"),
        ("logs.jsonl", "got a zip file; a table of Excel has a name in .xlsx"),
        ("table.xlsx", "can't be read as Excel"),
        ("other.db", "expected a log, got a store or another database of several tables; .*agro export"),
    ):
        with pytest.raises(Refused, match=message):
            import_files(into, [folder / name])


def test_a_log_that_grew_says_that_it_was_imported_before(into: Store, folder: Path) -> None:
    path = write(folder / "log.jsonl", record(reward=1))
    assert not import_files(into, [path]).before
    report = import_files(into, [write(path, record(reward=1), record(response="B"))])
    assert (report.samples, report.before) == (2, {"log.jsonl": 1})
    assert "log.jsonl: another file of this name was imported before (1 samples)" in str(report)
    assert not import_files(into, [path]).before  # the same again


COMPARED = {"context": [{"role": "user", "content": "2+2?"}], "response1": "4", "response2": "5"}
CHOSEN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
REJECTED = [CHOSEN[0], {"role": "assistant", "content": "5"}]
TIES: list[dict[str, Any]] = [
    {"prompt": "Q", "chosen": "A", "rejected": "B", "votes_chosen": 3, "votes_rejected": 3},
    {"prompt": "Q", "chosen": "A", "rejected": "B", "score_chosen": 0.5, "score_rejected": 0.5},
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
def test_a_tie_has_no_winner(row: dict[str, Any], into: Store, folder: Path) -> None:
    report = import_files(into, [write(folder / "log.jsonl", row)])
    assert (report.samples, report.pairs, report.ties) == (2, 0, 1)
    [pair] = into.pairs()
    assert pair.is_tie


def test_a_reward_of_two_responses_may_be_meta(into: Store, folder: Path) -> None:
    path = write(folder / "log.jsonl", PAIR | {"reward": 1.0})
    assert import_files(into, [path], mapping=parse_map(["meta.reward=reward"])).pairs == 1


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "q", "response": "a", "rating": "4/5"}, "rating"),
        ({"prompt": "q", "response": "a", "rating": "★★☆☆☆"}, "rating"),
        (
            {
                "request": {"messages": [{"role": "user", "content": "q"}]},
                "response": {"choices": [{"message": {"role": "assistant", "content": "a"}}]},
                "reward": 1.0,
            },
            "reward",
        ),
    ],
)
def test_what_may_rate_and_is_not_taken_is_named(
    into: Store, folder: Path, row: dict[str, Any], column: str
) -> None:
    report = import_files(into, [write(folder / "x.jsonl", row)])
    assert (report.samples, report.scored, report.unused) == (1, 0, [column])
