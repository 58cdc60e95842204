"""Formats of the user's own: a TOML file, an object in a Python file, and those of installed packages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agro.cli.program import app
from agro.errors import Refused
from agro.io import plugins
from agro.logs import format_table
from agro.logs.format_table import FORMATS, get
from agro.logs.importing import import_files
from agro.store import Store

GATEWAY = Path(__file__).parents[2] / "examples/plugins/gateway.toml"
PYTHON = """
from agro.logs.protocol import Format, Item

def read(row, context):
    return [Item.of({"prompt": row["q"], "response": a, "reward": r}, f"a[{i}]")
            for i, (a, r) in enumerate(zip(row["a"], row["r"]))]

FORMAT = Format("ours", "our lists", "samples", "us", lambda row: "q" in row, read)
OTHER = 3
"""


def request(content: str, thumb: Any, path: str = "/v1/chat/completions", status: int = 200) -> Any:
    return {
        "request": {"path": path, "model": "m", "messages": [{"role": "user", "content": "2+2?"}]},
        "response": {"choices": [{"message": {"role": "assistant", "content": content}}]},
        "feedback": {"thumb": thumb},
        "status": status,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_the_user_reads_skips_and_refuses(tmp_path: Path, store: Store) -> None:
    rows = [request("4", 1), request("5", "0"), request("6", None), request("x", 1, "/v1/embeddings")]
    log = write(tmp_path / "log.jsonl", [*rows, request("", 0, status=500)])
    report = import_files(store, [log], format=str(GATEWAY))
    assert [(s.response, s.reward, s.meta["model"]) for s in store.samples()] == [
        ("4", 1.0, "m"), ("5", 0.0, "m"), ("6", None, "m")
    ]  # fmt: skip
    assert report.left_out == {"requests that aren't of a chat": 1}
    assert [r.reason for r in report.refused] == ["the request failed (status != `200`)"]
    again = import_files(store, [log], format=str(GATEWAY))
    assert (again.samples, again.duplicates) == (0, 3)


def test_on_the_command_line(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [request("4", 1), request("5", 0)])
    store = str(tmp_path / "a.db")
    said = CliRunner().invoke(app, ["import", str(log), "--format", str(GATEWAY), "--store", store])
    assert said.exit_code == 0, said.output
    assert "2 samples" in said.output


def test_pairs_and_several_responses_of_a_record(tmp_path: Path, store: Store) -> None:
    declared = tmp_path / "pairs.toml"
    declared.write_text('kind = "pairs"\n[map]\nprompt = "q"\nchosen = "good"\nrejected = "bad"\n')
    import_files(
        store, [write(tmp_path / "a.jsonl", [{"q": "1", "good": "a", "bad": "b"}])], format=str(declared)
    )
    assert len(list(store.pairs())) == 1
    several = tmp_path / "several.toml"
    several.write_text('[map]\nprompt = "q"\nresponse = "a[*].text"\nreward = "a[*].score"\n')
    row = {"q": "2", "a": [{"text": "x", "score": 1}, {"text": "y", "score": 0}]}
    import_files(store, [write(tmp_path / "b.jsonl", [row])], format=str(several))
    assert [(s.response, s.reward) for s in store.samples() if s.prompt == "2"] == [("x", 1.0), ("y", 0.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = 3\n[map]\nprompt = 'q'", "title: Input should be a valid string; expected title, kind"),
        (
            "[map]\npromt = 'q'",
            r"own.toml: \[map\]: promt=q: .* no field promt; did you mean prompt\?",
        ),
        ("[map]\nprompt = 'q'\n[skip]\n'a ==' = 'x'", "a ==: expected a JMESPath expression"),
        ("[map]\nresponse = 'a['", r"own.toml: \[map\]: response=a\[: expected a column or a JMESPath"),
        ("rows = 1\n[map]\nprompt = 'q'", "rows: Extra inputs are not permitted"),
        ("[map", "expected TOML"),
        ("title = 'x'", "map: Field required"),
    ],
)
def test_a_file_that_is_no_declaration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(Refused, match=message):
        get(str(tmp_path / "own.toml"))


def test_a_broken_expression_is_refused_once_and_a_column_of_that_name_is_read(
    tmp_path: Path, store: Store
) -> None:
    log = write(tmp_path / "log.jsonl", [{"q": "1", "a (1": "x"}] * 2)
    import_files(store, [log], mapping={"prompt": "q", "response": "a (1"})
    assert [s.response for s in store.samples()] == ["x", "x"]
    with pytest.raises(Refused, match=r'--map response=a\(1: .* written in quotes, "a\(1"'):
        import_files(store, [log], mapping={"prompt": "q", "response": "a(1"}, replace=True)


def test_a_missing_file_and_one_that_maps_no_response(tmp_path: Path, store: Store) -> None:
    with pytest.raises(Refused, match="No such file"):
        get(str(tmp_path / "none.toml"))
    (tmp_path / "own.toml").write_text("[map]\nprompt = 'q'")
    log = write(tmp_path / "log.jsonl", [{"q": "1"}])
    with pytest.raises(Refused, match="expected response, messages, or chosen and rejected, got prompt"):
        import_files(store, [log], format=str(tmp_path / "own.toml"))


def test_an_object_in_a_python_file(tmp_path: Path, store: Store) -> None:
    (tmp_path / "ours.py").write_text(PYTHON)
    log = write(tmp_path / "log.jsonl", [{"q": "1", "a": ["x", "y"], "r": [1, 0]}] * 3)
    import_files(store, [log], format=f"{tmp_path}/ours.py:FORMAT")
    assert [s.reward for s in store.samples()] == [1.0, 0.0] * 3
    with pytest.raises(Refused, match=r"expected a Format \(agro.logs.protocol\), got 3"):
        get(f"{tmp_path}/ours.py:OTHER")
    with pytest.raises(Refused, match="has no 'NONE'"):
        get(f"{tmp_path}/ours.py:NONE")


def test_a_format_that_has_changed_is_another_one(tmp_path: Path, store: Store) -> None:
    """Read again with the same name, all responses were called duplicates, and kept their old rewards."""
    (tmp_path / "own.toml").write_text("[map]\nprompt = 'q'\nresponse = 'a'\nreward = 'r'")
    log = write(tmp_path / "log.jsonl", [{"q": "1", "a": "x", "r": 1, "s": 2}])
    import_files(store, [log], format=str(tmp_path / "own.toml"))
    (tmp_path / "own.toml").write_text("[map]\nprompt = 'q'\nresponse = 'a'\nreward = 's'")
    with pytest.raises(Refused, match=r"with other options \(--format\)"):
        import_files(store, [log], format=str(tmp_path / "own.toml"))
    import_files(store, [log], format=str(tmp_path / "own.toml"), replace=True)
    assert [s.reward for s in store.samples()] == [2.0]


def test_a_part_of_a_file_that_has_changed_is_run_again(tmp_path: Path) -> None:
    file, runs = tmp_path / "own.py", tmp_path / "runs"
    text = f"open({str(runs)!r}, 'a').write('x')\nA = 1\nB = [A]\n"
    file.write_text(text)
    assert [plugins.load("rewards", f"{file}:{name}", "set") for name in "ABA"] == [1, [1], 1]
    assert runs.read_text() == "x"
    file.write_text(text.replace("A = 1", "A = 2"))
    os.utime(file, ns=(0, 1))
    assert plugins.load("rewards", f"{file}:B", "set") == [2]
    with pytest.raises(Refused, match=r"set: .*own\.py has no 'C'"):
        plugins.load("rewards", f"{file}:C", "set")


def points(monkeypatch: pytest.MonkeyPatch, kind: str, *parts: str) -> None:
    """Have installed packages that register these parts under the name a."""
    found = [EntryPoint("a", part, f"agro.{kind}") for part in parts]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    plugins.installed.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    plugins.installed.cache_clear()


def test_packages_with_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, "rewards", "one:f", "two:f")
    with pytest.raises(Refused, match="two installed packages have rewards named a: one:f and two:f"):
        plugins.installed("rewards")


def test_a_package_brings_a_file_and_no_name_of_another(tmp_path, monkeypatch) -> None:
    """Its records are recognized by their columns. A format of a name that there was replaced that one."""
    (tmp_path / "theirs.toml").write_text("columns = ['q', 'a']\n[map]\nprompt = 'q'\nresponse = 'a'")
    (tmp_path / "brought.py").write_text(
        f"from pathlib import Path\nFILE = Path({str(tmp_path / 'theirs.toml')!r})\n"
        "from agro.logs.format_table import get\nTAKEN = get('interchange')\nWRONG = [3]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points(monkeypatch, "formats", "brought:FILE")
    (format,) = format_table._installed()
    assert (format.name, format.fits({"q": 1, "a": 2}), format.fits({"q": 1})) == ("theirs", True, False)
    points(monkeypatch, "formats", "brought:TAKEN")
    taken = [replace(format, title="theirs") for format in format_table._installed()]
    with pytest.raises(Refused, match=r"two formats are called interchange: .*, and theirs, of an installed"):
        format_table._indexed([*FORMATS.values(), *taken])
    points(monkeypatch, "formats", "brought:WRONG")
    with pytest.raises(Refused, match=r"expected a Format, the Path .* got \[3\].* or uninstall it"):
        list(format_table._installed())


def test_those_of_this_distribution_are_found() -> None:
    assert get("langfuse").kind == "samples"
    assert plugins.installed("formats")["agro_formats"] == "agro_formats:FORMATS"
