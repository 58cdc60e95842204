"""Objectives of single papers, one family a file, with the recipes of methods.toml."""

from pathlib import Path

from agro.objectives.table import with_methods
from agro_papers.methods import (
    balanced,
    equivalent,
    experts,
    imitated,
    mirror,
    rec,
    reinforced,
    rivals,
    truncated,
    trust_region,
    values,
)

OBJECTIVES = with_methods(
    {
        **values.ENTRIES,
        **reinforced.ENTRIES,
        **balanced.ENTRIES,
        **experts.ENTRIES,
        **mirror.ENTRIES,
        **rec.ENTRIES,
        **imitated.ENTRIES,
        **truncated.ENTRIES,
        **trust_region.ENTRIES,
        **rivals.ENTRIES,
        **equivalent.ENTRIES,
    },
    Path(__file__).with_name("methods.toml"),
)
CLAIMS = "agro_papers.claims:CLAIMS"
