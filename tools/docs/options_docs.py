"""The page of objectives' and sources' options: `python tools/docs/options_docs.py > docs/options.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from config_docs import cells, row, shown, values

from agro.io import plugins
from agro.objectives import describe, get, names

SHARED = 8  # an option is shared if this many objectives have it with the same meaning
HEAD = """# Options of objectives and sources

<!-- Made by `python tools/docs/options_docs.py > docs/options.md`; change the declarations instead. -->

`objective.name` chooses the objective; the other keys of `[objective]` are its options. `agro objectives
NAME` prints them with the equation. A number may also be a schedule over the steps of a phase:
`{ start = 0.1, end = 0.02, steps = 100, shape = "linear" }`, or `shape = "cosine"`; after `steps` it stays at
`end`.

## Shared options

Each objective below names the shared options that it has.

| key | default | value | unit | meaning |
|---|---|---|---|---|
"""
SOURCES = """## Sources

`source.around` names the source, `[source.options]` has its options. Your own source has the options that it
declares.
"""


def page() -> str:
    shared = shared_options()
    parts = [HEAD + "\n".join(_row(key, option) for key, option in shared.items()) + "\n", "## Objectives\n"]
    parts += [_objective(name, shared) for name in names()]
    return "\n".join([*parts, SOURCES, *(line for name in sources_of_agro() for line in _source(name))])


def sources_of_agro() -> list[str]:
    """Names for source.around that come with agro."""
    found = plugins.installed("sources").items()
    return sorted(name for name, where in found if where.startswith("agro_papers."))


def shared_options() -> dict[str, dict[str, Any]]:
    """Options that many objectives declare with one meaning and one default."""
    options = {name: describe(name)["options"] for name in names() if not get(name).of}
    count = Counter((key, str(option)) for own in options.values() for key, option in own.items())
    return {
        key: option
        for own in options.values()
        for key, option in own.items()
        if count[key, str(option)] >= SHARED
    }


def _row(key: str, option: dict[str, Any]) -> str:
    default = "to be given" if option["required"] else shown(option["default"])
    return cells(f"`objective.{key}`", default, option["expected"], option["unit"], option["meaning"])


def _objective(name: str, shared: dict[str, dict[str, Any]]) -> str:
    d = describe(name)
    needs = ", ".join(f"`{need}`" for need in d["needs"]) or "texts alone"
    defaults = " (with its defaults)" if d["options"] else ""
    lines = [f"### {name}\n", f"{d['source']}. Needs {needs}{defaults}.\n"]
    if d["preset_of"]:
        others = ", ".join(f"`{key}` = {shown(value)}" for key, value in get(name).preset.items())
        differ = f"; its defaults differ in {others}" if others else ""
        return "\n".join([*lines, f"The options of `{d['preset_of']}`{differ}.\n"])
    own = {key: option for key, option in d["options"].items() if shared.get(key) != option}
    if own:
        lines.append("| key | default | value | unit | meaning |\n|---|---|---|---|---|")
        lines += [_row(key, option) for key, option in own.items()]
    if also := [f"`{key}`" for key in d["options"] if key not in own]:
        lines.append(f"\nShared: {', '.join(also)}.")
    return "\n".join(lines) + "\n"


def _source(name: str) -> Iterator[str]:
    schema = plugins.load("sources", name, name).options.model_json_schema()
    yield f"### source.around = {name}\n"
    yield schema["description"] + "\n"
    yield "| key | default | value | meaning |\n|---|---|---|---|"
    yield from (row(key, value, schema, None) for key, value, _ in values("source.options.", schema, {}))
    yield ""


if __name__ == "__main__":
    print(page(), end="")
