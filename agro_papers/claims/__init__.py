"""What the sources of `agro_papers.methods` claim."""

from agro.proof.claim import Claims
from agro_papers.claims import (
    balanced_claims,
    experts_claims,
    imitated_claims,
    rec_claims,
    rivals_claims,
    truncated_claims,
    trust_region_claims,
    values_claims,
)

FAMILIES = (
    *(values_claims, balanced_claims, experts_claims, rec_claims),
    *(imitated_claims, truncated_claims, trust_region_claims, rivals_claims),
)
CLAIMS: dict[str, tuple[Claims, ...]] = {
    name: claims for family in FAMILIES for name, claims in family.CLAIMS.items()
}
