"""Tests of placed runs use the tiny run of tests/train."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "train"))
