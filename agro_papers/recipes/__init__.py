"""Recipes of the sources of this package, `agro train NAME`."""

from pathlib import Path

FOLDER = Path(__file__).parent
