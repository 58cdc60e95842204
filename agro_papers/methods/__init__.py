"""Objectives of single papers, one family a file, with the recipes of recipes.toml."""

from pathlib import Path

from agro.objectives.methodrecipe import with_recipes
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

OBJECTIVES = with_recipes(
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
    Path(__file__).with_name("recipes.toml"),
)
CLAIMS = "agro_papers.claims:CLAIMS"
