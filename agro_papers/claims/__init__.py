"""What the sources of `agro_papers.methods` claim."""

from agro.proof.claim import Claims
from agro_papers.claims import (
    balanced_claims,
    equivalent_claims,
    experts_claims,
    imitated_claims,
    mirror_claims,
    rec_claims,
    reinforced_claims,
    rivals_claims,
    truncated_claims,
    trust_region_claims,
    values_claims,
)

FAMILIES = (
    *(values_claims, reinforced_claims, balanced_claims, experts_claims, mirror_claims, rec_claims),
    *(imitated_claims, truncated_claims, trust_region_claims, rivals_claims, equivalent_claims),
)
CLAIMS: dict[str, tuple[Claims, ...]] = {
    name: claims for family in FAMILIES for name, claims in family.CLAIMS.items()
}
