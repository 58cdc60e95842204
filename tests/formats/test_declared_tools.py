"""Real reports of conversations: what they say arrives, or is refused by record."""

import json
from pathlib import Path

import pytest

from agro.logs.importing import import_files
from agro.rollout.prompts import load_prompts
from agro.store import Store

REPORTS = Path(__file__).parents[3] / "shared" / "data" / "reports"
pytestmark = pytest.mark.skipif(not REPORTS.is_dir(), reason=f"{REPORTS} isn't there")
IMAGE = "expected text, got a part of type image"


def test_tools_of_a_log_are_those_of_its_prompt_file(tmp_path: Path) -> None:
    request = json.loads((REPORTS / "tools.jsonl").read_text().splitlines()[0])["request"]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": request["messages"], "tools": request["tools"]}) + "\n")
    with Store.open(tmp_path / "store.db") as store:
        import_files(store, [REPORTS / "tools.jsonl"])
        samples = list(store.samples())
    assert len(samples) == 2
    first = samples[0].prompt[0]
    assert isinstance(first, dict)
    assert (first["role"], json.loads(first["content"])[0]["function"]["name"]) == ("tools", "get_weather")
    assert {s.prompt_id for s in samples} == {load_prompts(file)[0].id}


@pytest.mark.parametrize(("name", "count"), [("parts.jsonl", 3), ("parts_conv.jsonl", 2)])
def test_an_image_is_refused_by_record(name: str, count: int, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [REPORTS / name])
        assert len(list(store.samples())) == count
    assert [IMAGE in refused.reason for refused in report.refused] == [True]
