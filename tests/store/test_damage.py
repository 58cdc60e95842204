"""A byte changed on the disk is detected and named; intact rows can be read and recovered to a new store."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from making import group, random_samples, sample

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.store import At, Damage, DrawRule, Pair, Store, recover, write_samples
from agro.store.database import DERIVED, LEDGERS
from agro.store.sample_rows import COLUMNS, SAMPLE, SampleRow, from_rows, is_valid_sample, sample_checksum
from agro.types import Sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """40 random samples, 3 groups of 4 that a run drew from, one of them redone, and 2 pairs."""
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.append(random_samples(5, 40))
        store.append([s for name in "abc" for s in group(name, [0.0, 1.0, 0.5, None])], run="r", step=1)
        store.add_pairs([Pair(1, 2, 3, -0.0), Pair(1, 3)])
        for step in (1, 2, 3):
            store.draw(DrawRule(4), At("r", step, seed=0, version=0))
            store.ledger.commit("r", step, f"digest {step}", files={"model": "x"})
        store.append([sample("late")], run="r", step=4)
        store.ledger.rewind("r")
    return path


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql)


def everything(path: Path) -> dict[str, list[tuple]]:
    with Store.open(path, read_only=True) as store:
        rowid = {t: "" if t in DERIVED else "rowid, " for t in ("samples", *LEDGERS)}
        return {t: store.tables.run(f"SELECT {rowid[t]}* FROM {t} ORDER BY 1, 2, 3") for t in rowid}


def test_a_store_that_was_written_to_in_every_way_is_whole(path: Path) -> None:
    with Store.open(path) as store:
        assert not store.tables.damage()
        store.set_rewards([(7, 1.5, {"parts": {"a": 1}}), (8, None, {"reward_error": "x"}), (7, 0.25, {})])
        assert store.ledger.rewind("r", to=store.ledger.commits("r")[0]).draws > 0
        assert store.tables.damage() == Damage()
        assert str(store.tables.damage()) == "intact"


@pytest.mark.parametrize("column", [*COLUMNS, "redone", "checksum"])
def test_whatever_changes_in_a_sample_is_found(path: Path, column: str) -> None:
    others = {
        "reward": "reward + 0.5",
        "prompt": "prompt || 'x'",
        "messages": "prompt, prompt = NULL",
        "prompt_id": "'other'",
    }
    numbers = {"state", "version", "step", "record", "redone", "checksum"}
    numbers |= {"knows_behavior", "knows_tokens", "knows_kept"}
    value = others.get(column, f"ifnull({column}, 0) + 1" if column in numbers else "x'00'")
    change(path, f"UPDATE samples SET {column} = {value} WHERE id = 42")
    with Store.open(path) as store:
        assert store.tables.damage().samples == [42]
        message = r"1 sample not as written: sample 42\. What to do: `agro store recover .*s\.db "
        with pytest.raises(Refused, match=message):
            list(store.samples(redone=True))
        intact = [s.id for s in store.samples(redone=True, skip_damaged=True)]
        assert set(range(1, 54)) - set(intact) == {42}


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        (
            "UPDATE samples SET episode = NULL, file = 'f', record = 1, part = 'p' WHERE id = 44",
            Damage(samples=[44]),
        ),
        ("UPDATE draws SET step = 9 WHERE rowid = 3", Damage(draws=[3])),
        ("UPDATE pairs SET votes_winner = 2 WHERE rowid = 1", Damage(pairs=[1])),
        ("UPDATE commits SET cursor = cursor - 1 WHERE rowid = 2", Damage(commits=[2])),
        ("UPDATE commits SET files = '{}' WHERE rowid = 1", Damage(commits=[1])),
    ],
)
def test_whatever_changes_elsewhere_is_found(path: Path, sql: str, found: Damage) -> None:
    change(path, sql)
    with Store.open(path) as store:
        assert store.tables.damage() == found
        if found.pairs:
            with pytest.raises(Refused, match="1 pair not as written: pair 1"):
                list(store.pairs())
        if found.draws:
            with pytest.raises(Refused, match="1 draw not as written: draw 3"):
                store.tables.check()
        else:
            store.tables.check()
        assert [c.step for c in store.ledger.commits("r")] == [s for s in (1, 2, 3) if s not in found.commits]


def test_a_later_write_hides_no_damage(path: Path) -> None:
    change(path, "UPDATE samples SET response = 'other', reward = 9.0 WHERE id IN (42, 53)")
    with Store.open(path) as store:
        store.set_rewards([(42, 0.5, {})])
        store.ledger.rewind("r", to=store.ledger.commits("r")[0])
        assert store.tables.damaged("samples") == [42, 53]
    change(path, "UPDATE samples SET meta = '{' WHERE id = 43")
    with Store.open(path) as store, pytest.raises(Refused, match="sample 43"):
        store.set_rewards([(43, 0.5, {})])


def test_an_earlier_commit_takes_the_later_ones_back(path: Path) -> None:
    with Store.open(path) as store:
        first, second, third = store.ledger.commits("r")
        assert [c.step for c in (first, second, third)] == [1, 2, 3]
        store.ledger.rewind("r", to=second)
        assert store.ledger.commits("r") == [first, second]
        assert store.ledger.committed("r") == second
        assert {s for (s,) in store.tables.run("SELECT DISTINCT step FROM draws")} == {1, 2}
        assert store.tables.run("SELECT count(*) FROM commits") == [(4,)]  # only ever appended to
        store.ledger.rewind("r", to=second)
        assert store.tables.run("SELECT count(*) FROM commits") == [(4,)]
        store.ledger.commit("r", 3, "again")
        assert [c.digest for c in store.ledger.commits("r")] == ["digest 1", "digest 2", "again"]
        with pytest.raises(ValueError, match="has no commit"):
            store.ledger.rewind("r", to=third)


@pytest.mark.parametrize("column", ["uses", "last"])
def test_a_damaged_count_of_draws_is_reported_before_it_changes_a_draw(path: Path, column: str) -> None:
    first = "SELECT min(rowid) FROM group_uses"
    change(path, f"UPDATE group_uses SET {column} = {column} + 1 WHERE rowid = ({first})")
    with Store.open(path) as store:
        assert len(store.tables.damage().group_uses) == 1
        draws = store.tables.run("SELECT count(*) FROM draws")
        for write in (store.tables.check, lambda: store.draw(DrawRule(4), At("r", 4, seed=0, version=0))):
            with pytest.raises(Refused, match="1 draw count not as written"):
                write()
        assert store.tables.run("SELECT count(*) FROM draws") == draws
        store.ledger.rewind("r")  # counts them anew
        store.draw(DrawRule(4), At("r", 4, seed=0, version=0))


@pytest.mark.parametrize("change_", ["done = 1", "step = 7", "collector = 'other'", "number = 9"])
def test_a_damaged_request_is_reported_by_whoever_uses_it(path: Path, change_: str) -> None:
    with Store.open(path) as store:
        store.requests.claim("r", "one", maximum=3, ahead=3)
    change(path, f"UPDATE requests SET {change_} WHERE number = 1")
    with Store.open(path) as store:
        assert len(store.tables.damage().requests) == 1
        for use in (
            lambda: store.requests.ready("r", 3),
            lambda: store.requests.claim("r", "two", maximum=1, ahead=9, dead=["one"]),
            store.tables.check,
        ):
            with pytest.raises(Refused, match="1 request not as written"):
                use()


def drawn(store: Store) -> list[int | None]:
    return [s.id for s in store.draw(DrawRule(2), At("r", 4, seed=0, version=0)).samples]


def requested(store: Store) -> tuple[list[int], ...]:
    claimed = store.requests.claim("r", "two", maximum=9, ahead=99, dead=["one"])
    rows = store.tables.run("SELECT number, done, step FROM requests ORDER BY 1")
    return claimed, store.requests.ready("r", 99), rows


@pytest.mark.parametrize(("table", "use"), [("group_uses", drawn), ("requests", requested)])
def test_a_flipped_byte_in_a_table_of_a_run_changes_nothing_silently(
    path: Path, tmp_path: Path, table: str, use: Callable[[Store], object]
) -> None:
    """Each of 40 bytes of the table's pages, alone: what is done next is the same, or it is refused."""
    with Store.open(path) as store:
        for _ in range(20):
            done = store.requests.claim("r", "one", maximum=3, ahead=99)
            store.requests.finish("r", done[:2])
            store.requests.take("r", 4, done[:1])
    with closing(sqlite3.connect(path)) as db:
        pages = [p for (p,) in db.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = ?", [table])]
    content = path.read_bytes()

    def used(changed: bytes) -> object:
        file = tmp_path / "flipped.db"
        for old in tmp_path.glob("flipped.db*"):
            old.unlink()
        file.write_bytes(changed)
        with Store.open(file) as store:
            return use(store)

    expected, rng, refused = used(content), random.Random(0), 0
    filled = [i for p in pages for i in range((p - 1) * 4096, p * 4096) if content[i]]
    for at in rng.choices(filled, k=40):
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        try:
            assert used(bytes(flipped)) == expected
        except Refused:
            refused += 1
    assert refused > 20


def test_recovering_a_whole_store_copies_it(path: Path, tmp_path: Path) -> None:
    done = recover(path, tmp_path / "new.db")
    assert [done.taken[table] for table in ("samples", "pairs", "commits")] == [53, 2, 3]
    assert done.lost == done.may_miss == []
    assert not done.lost_rows.total()
    assert sorted(p.name for p in tmp_path.iterdir() if "new" in p.name) == ["new.db"]
    assert everything(tmp_path / "new.db") == everything(path)
    with pytest.raises(Refused, match=r"new\.db: there is such a file"):
        recover(path, tmp_path / "new.db")


def test_recovering_takes_what_another_process_is_writing_from_the_log(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        store.append([sample("newest")])  # in the write-ahead log alone
        assert recover(path, tmp_path / "new.db").taken["samples"] == 54


def test_recovering_leaves_damaged_rows_behind_and_counts_them(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        [(drawn,)] = store.tables.run("SELECT count(*) FROM draws WHERE sample = 42")
        draws = store.tables.run("SELECT count(*) FROM draws")[0][0]
    change(path, "UPDATE samples SET response = 'other' WHERE id IN (2, 42)")
    change(path, "UPDATE commits SET digest = 'other' WHERE rowid = 3")
    done = recover(path, tmp_path / "new.db")
    assert done.lost == [2, 42]
    taken, lost = done.taken, done.lost_rows
    assert (taken["samples"], taken["pairs"], lost["pairs"], taken["commits"]) == (51, 1, 1, 2)
    assert (lost["commits"], taken["draws"] + lost["draws"]) == (1, draws)
    assert lost["draws"] >= drawn > 0
    assert "lost samples: 2 (ids 2, 42)\nlost pairs: 1" in str(done)
    with Store.open(tmp_path / "new.db") as store:
        assert not store.tables.damage()
        assert store.ledger.committed("r").step == 2


def break_page(path: Path, page: int) -> None:
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = bytes(4096)
    path.write_bytes(content)


@pytest.mark.parametrize("later", [0, 40])
def test_a_leaf_of_zeros(later: int, path: Path, tmp_path: Path) -> None:
    """The last one, whose samples an index counts, or one before others."""
    with Store.open(path) as store:
        store.append(random_samples(6, later))
    break_page(path, path.read_bytes().rindex(b"response 3") // 4096 + 1)
    with pytest.raises(Refused, match="agro store recover"), Store.open(path) as store:
        store.counts()
    done = recover(path, tmp_path / "new.db")
    assert 1 <= len(done.lost) <= 23
    assert len(done.lost) == 53 + later - done.taken["samples"]
    assert done.may_miss == []


def test_lost_draws_are_counted_by_their_index(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        [(page,)] = store.tables.run("SELECT rootpage FROM sqlite_master WHERE name = 'draws'")
        [(draws,)] = store.tables.run("SELECT count(*) FROM draws")
    break_page(path, page)
    done = recover(path, tmp_path / "new.db")
    assert (done.taken["samples"], done.lost_rows["draws"], done.may_miss) == (53, draws, [])


def test_a_table_that_cant_be_read(path: Path, tmp_path: Path) -> None:
    """How many rows it had isn't known."""
    with Store.open(path) as store:
        [(page,)] = store.tables.run("SELECT rootpage FROM sqlite_master WHERE name = 'pairs'")
    break_page(path, page)
    done = recover(path, tmp_path / "new.db")
    assert (done.taken["samples"], done.taken["pairs"], done.may_miss) == (53, 0, ["pairs"])
    assert "there may have been more: pairs" in str(done)


def test_nothing_of_a_store_to_recover(tmp_path: Path) -> None:
    Store.open(tmp_path / "whole.db").close()
    whole = (tmp_path / "whole.db").read_bytes()
    for content in (b"", b"x" * 9000, bytes(4096) + whole[4096:]):
        (tmp_path / "x.db").write_bytes(content)
        with pytest.raises(Refused, match="it has no readable sample of a store"):
            recover(tmp_path / "x.db", tmp_path / "new.db")
        assert not (tmp_path / "new.db").exists()
    with pytest.raises(Refused, match="no such store"):
        recover(tmp_path / "no.db", tmp_path / "new.db")


def test_flipped_bits_anywhere_never_pass_for_what_was_written(path: Path, tmp_path: Path) -> None:
    """Each of 30 bits of the file, alone: it is harmless, or whoever reads everything is told. So is who
    writes to it; and who reads half of the file."""
    log = tmp_path / "log.jsonl"
    write_samples(log, random_samples(4, 5))

    def read(file: Path) -> dict[int | None, Sample]:
        with Store.open(file, read_only=True) as store:
            return {s.id: s for s in store.samples(redone=True)}

    whole, content, rng, told = read(path), path.read_bytes(), random.Random(0), list[tuple[Path, str]]()
    for n in range(30):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            assert read(path) == whole
        except Refused as error:
            told.append((path, str(error)))
        (tmp_path / "new.db").unlink(missing_ok=True)
        done = recover(path, tmp_path / "new.db")
        kept = read(tmp_path / "new.db")
        assert kept == {i: s for i, s in whole.items() if i not in done.lost}
        assert len(kept) == done.taken["samples"]
        written = tmp_path / f"{n}.db"
        written.write_bytes(flipped)
        try:
            with Store.open(written) as store:
                store.groups()
                import_files(store, [log])
        except Refused as error:
            told.append((written, str(error)))
    assert 5 <= sum(file == path for file, _ in told) <= 25
    assert all(str(file) in text for file, text in told)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(Refused, match=r"s\.db: .*damaged.*agro store recover"):
        read(path)
    (tmp_path / "new.db").unlink()
    with pytest.raises(Refused, match=r"s\.db"):
        recover(path, tmp_path / "new.db")


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("reward", float("inf"), "a finite number"),
        ("role", "judge", "role: expected one of"),
        ("tokens", b"\xff" * 8, "tokens: expected"),
        ("behavior_logp", b"", "one value for each of the 2 tokens"),
    ],
)
def test_a_right_checksum_makes_no_record_valid(column: str, value: object, problem: str) -> None:
    """Anybody can compute one: for a store's file."""
    valid = sample(tokens=[1, 2], action=[False, True], behavior_logp=[float("nan"), -1.0])
    values = list(SampleRow.of(valid).values)
    values[SAMPLE.index(column)] = value
    values[-1] = sample_checksum(values)
    assert is_valid_sample(values)
    with pytest.raises(Refused, match=problem):
        from_rows([tuple(values)])
