"""Formats of other programs' logs and of public data sets, for `agro import`.

agro finds them by the entry point `agro.formats`, as it finds those of any other package.
"""

from pathlib import Path

FORMATS = Path(__file__).with_name("formats.toml")
