"""The table of the formats of this package; its modules say how each is read."""

from __future__ import annotations

from pathlib import Path

from agro.logs.declared import Declarations

DECLARATIONS = Declarations(Path(__file__).with_name("formats.toml"))
