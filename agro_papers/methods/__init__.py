"""Objectives of single papers, one family per file, with the recipes of methods.toml."""

from pathlib import Path

from agro.objectives.table import with_methods
from agro_papers.methods import experts, rivals, trust_region, values, weighted

FAMILIES = (values, weighted, experts, trust_region, rivals)
OBJECTIVES = with_methods(
    {name: entry for family in FAMILIES for name, entry in family.ENTRIES.items()},
    Path(__file__).with_name("methods.toml"),
)
CLAIMS = "agro_papers.claims:CLAIMS"
