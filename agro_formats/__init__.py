"""Logs of other programs and public data sets, as formats for `agro import`.

agro finds them by the entry point `agro.formats`, as it would find those of another package.
"""

from pathlib import Path

FORMATS = Path(__file__).with_name("formats.toml")
