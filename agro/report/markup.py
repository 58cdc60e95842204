"""Pieces of HTML that the pages are made of. What comes from outside goes through `escape`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template

from matplotlib.figure import Figure

from agro.report.figures import VARIABLES, svg

LONG = 18  # characters of a value that takes twice the room
UNKNOWN = '<span class="unknown">not measured</span>'


def escape(text: str) -> str:
    """Text as text, whatever it holds: lone surrogates, which UTF-8 has no place for, become their escapes."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def fill(template: str, **parts: str) -> str:
    """A page of this folder's `template`, with the style that all of them share."""
    here = files("agro.report")
    style = (here / "page.css").read_text(encoding="utf-8").strip()
    return Template((here / template).read_text(encoding="utf-8")).substitute(style=style, **parts)


def aside(text: str) -> str:
    return f'<div class="aside">{escape(text)}</div>' if text else ""


def unknown(text: str) -> str:
    return f'<p class="unknown">{escape(text)}</p>'


def number(value: float | None, form: str = ".3f", se: float = math.nan) -> str:
    """A value and its standard error (NaN: unknown), each in the format `form`."""
    if value is None:
        return UNKNOWN
    error = f' <span class="aside">± {se:{form.lstrip("+")}}</span>' if math.isfinite(se) else ""
    return f'<span class="number"><b>{value:{form}}</b>{error}</span>'


def facts(items: Mapping[str, str | None]) -> str:
    """Names and values, these in HTML; None: not measured."""
    return (
        "<dl>"
        + "".join(_fact(name, UNKNOWN if value is None else value) for name, value in items.items())
        + "</dl>"
    )


def _fact(name: str, value: str) -> str:
    room = ' class="long"' if len(value) > LONG and "<" not in value else ""
    return f"<div{room}><dt>{name}</dt><dd>{value}</dd></div>"


def table(rows: Sequence[Mapping[str, str]], heads: Mapping[str, str] | None = None) -> str:
    """Rows of cells in HTML under their names, or under `heads` where a name is too short for a wide page."""
    names = "".join(f"<th>{(heads or {}).get(name, name)}</th>" for name in rows[0])
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(map(_row, rows))}</tbody></table>"


def _row(cells: Mapping[str, str]) -> str:
    return "<tr>" + "".join(f'<td data-label="{k}"><div>{v}</div></td>' for k, v in cells.items()) + "</tr>"


def panel(title: str, caption: str, figure: Figure | None, key: str = "") -> str:
    """A small figure under its title, `key` and caption in HTML; None: not measured."""
    if figure is None:
        return f'<figure><h3>{title}</h3><p class="unknown">not measured</p></figure>'
    return (
        f'<figure><h3>{title}</h3>{key}<div role="img" aria-label="{title}">{svg(figure, title)}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def both(name: str, wide: Figure, narrow: Figure) -> str:
    """A figure for wide and for narrow windows."""
    return (
        f'<div role="img" aria-label="{name}"><div class="wide">{svg(wide, name + "wide")}</div>'
        f'<div class="narrow">{svg(narrow, name + "narrow")}</div></div>'
    )


def key(entries: Sequence[tuple[str, str]]) -> str:
    """Colours of a figure, and what they stand for."""
    spots = "".join(f'<span><i style="background:{css(c)}"></i>{escape(text)}</span>' for c, text in entries)
    return f'<p class="key">{spots}</p>'


def tabs(name: str, parts: Mapping[str, str]) -> str:
    """One part at a time, chosen by its label. No script: the style shows what stands at the chosen one's place."""
    choices = "".join(
        f'<input type="radio" name="{name}" id="{name}-{i}"{" checked" * (i == 0)}><label for="{name}-{i}">{label}</label>'
        for i, label in enumerate(parts)
    )
    return (
        f'<div class="tabs">{choices}' + "".join(f"<div>{part}</div>" for part in parts.values()) + "</div>"
    )


def css(colour: str) -> str:
    return f"var(--{VARIABLES[colour]})"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"
    )
