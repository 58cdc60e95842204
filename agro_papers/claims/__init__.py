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

CLAIMS: dict[str, tuple[Claims, ...]] = {
    **values_claims.CLAIMS,
    **reinforced_claims.CLAIMS,
    **balanced_claims.CLAIMS,
    **experts_claims.CLAIMS,
    **mirror_claims.CLAIMS,
    **rec_claims.CLAIMS,
    **imitated_claims.CLAIMS,
    **truncated_claims.CLAIMS,
    **trust_region_claims.CLAIMS,
    **rivals_claims.CLAIMS,
    **equivalent_claims.CLAIMS,
}
