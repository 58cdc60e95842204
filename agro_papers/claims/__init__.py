"""The claims that the papers behind `agro_papers.methods` make."""

from agro.proof.claim import Claims
from agro_papers.claims import (
    experts_claims,
    rivals_claims,
    trust_region_claims,
    values_claims,
    weighted_claims,
)

CLAIMS: dict[str, tuple[Claims, ...]] = {
    **values_claims.CLAIMS,
    **weighted_claims.CLAIMS,
    **experts_claims.CLAIMS,
    **trust_region_claims.CLAIMS,
    **rivals_claims.CLAIMS,
}
