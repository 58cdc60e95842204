"""Render pages from this folder's templates, which escape everything they print."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from agro.errors import without_secrets
from agro.io import numbers


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("agro.pages.run"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (numbers.fixed, numbers.count, numbers.duration, numbers.percent)
    environment.filters |= {f.__name__: f for f in filters}
    environment.tests["known"] = numbers.is_known
    return environment


def render(template: str, **context: Any) -> str:
    """Render a page. Lone surrogates, which UTF-8 can't encode, become escapes such as \\ud800."""
    text = without_secrets(_environment().get_template(template).render(**context))
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def template_text(name: str) -> str:
    """Read a file of the templates' folder."""
    return (files("agro.pages.run") / "templates" / name).read_text(encoding="utf-8")


def with_script(page: str, source: str) -> str:
    """Add a script to the page's head. The page's policy allows only this script, by its hash."""
    allowed = f"'sha256-{b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
    head, end, remaining = page.partition("</head>")
    if "script-src " in head:
        head = head.replace("script-src ", f"script-src {allowed} ", 1)
    else:
        head = head.replace("style-src ", f"script-src {allowed}; style-src ", 1)
    return f"{head}<script>{source}</script>\n{end}{remaining}"
