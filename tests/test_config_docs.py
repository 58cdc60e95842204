"""docs/configuration.md is what agro/config/ says, and agro/config/ says something of every value."""

from __future__ import annotations

from pathlib import Path

import config_docs

from agro import objectives
from agro.config import RunConfig
from agro.io import plugins

PAGE = Path(__file__).parents[1] / "docs/configuration.md"


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


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == config_docs.page(), (
        "make it anew: python tools/docs/config_docs.py > docs/configuration.md"
    )


def test_the_page_holds_every_value_and_every_option() -> None:
    page = config_docs.page()
    rows = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    sections = set(RunConfig.model_fields)
    values = {
        k for k in described() if k not in sections and not k.startswith(("phases.", "reward.functions."))
    }
    assert values <= set(rows)
    assert len(config_docs.sources_of_agro()) == 7
    for name in config_docs.sources_of_agro():
        fields = plugins.load("sources", name, name).options.model_fields
        part = page.split(f"### source.around = {name}\n")[1].split("###")[0]
        assert all(f"| `source.options.{key}` |" in part for key in fields)
        assert all(field.description for field in fields.values())
    for name in objectives.names():
        entry, part = objectives.get(name), page.split(f"### {name}\n")[1].split("###")[0]
        if entry.of:
            assert f"The options of `{entry.of}`" in part
            assert all(f"`{key}` = " in part for key in entry.preset)
            continue
        options = [f"objective.{key}" for key in objectives.describe(name)["options"]]
        assert all(f"| `{key}` |" in part for key in options)


def test_a_row_gives_default_bounds_and_meaning() -> None:
    row = next(line for line in config_docs.page().splitlines() if "`data.replay`" in line)
    meaning = RunConfig.model_fields["data"].annotation.model_fields["replay"].description  # type: ignore[union-attr]
    assert row == f"| `data.replay` | `0.0` | number or table | {' '.join(meaning.split())} |"
    assert r"largest \|loss\|" in config_docs.page()
