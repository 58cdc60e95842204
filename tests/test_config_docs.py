"""docs/configuration.md and docs/options.md are what the code declares, with a meaning for every value."""

from __future__ import annotations

from pathlib import Path

import config_docs
import options_docs
import pytest

from agro import objectives
from agro.config import RunConfig
from agro.io import plugins

DOCS = Path(__file__).parents[1] / "docs"


def described() -> dict[str, str]:
    """The description of every value of every section, by dotted key."""
    schema = RunConfig.model_json_schema()

    def walk(prefix, section):
        for key, value, inner in config_docs.values(prefix, section, schema["$defs"]):
            yield key, value.get("description") or (inner or {}).get("description", "")
            if inner is not None:
                yield from walk(f"{key}.", inner)

    return dict(walk("", schema))


def test_every_value_has_a_meaning() -> None:
    found = described()
    assert {"train.lr", "policy.lora.rank", "reward.functions.weight", "phases.name"} <= found.keys()
    assert [key for key, meaning in found.items() if not meaning] == []


def rows(page: str) -> list[str]:
    return [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(("file", "module"), [("configuration", config_docs), ("options", options_docs)])
def test_the_page_is_up_to_date(file, module) -> None:
    assert (DOCS / f"{file}.md").read_text(encoding="utf-8") == module.page(), (
        f"make it anew: python tools/docs/{module.__name__}.py > docs/{file}.md"
    )


@pytest.mark.parametrize("name", options_docs.sources_of_agro())
def test_every_option_of_a_source_has_a_meaning(name: str) -> None:
    fields = plugins.load("sources", name, name).options.model_fields
    assert all(field.description for field in fields.values())


def test_a_shared_option_is_one_option() -> None:
    """It has a row of its own, and an objective in which it means something else repeats it."""
    shared = options_docs.shared_options()
    assert [f"objective.{key}" for key in shared] == rows(options_docs.page().partition("## Objectives")[0])
    others = objectives.describe("agro")["options"]["beta"], objectives.describe("dpo")["options"]["beta"]
    assert shared["beta"] in others
    assert others[0] != others[1]
