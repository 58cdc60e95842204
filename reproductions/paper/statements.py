"""What the paper proves, in its order, and where each is measured: these need no runs of a language model.

The sentences about its figures are in `experiments`.
"""

from __future__ import annotations

from typing import NamedTuple


class Statement(NamedTuple):
    text: str
    where: str


PROVED = (
    Statement(
        "The maximum of E r − β KL(π ‖ π_ref) is π\\* ∝ π_ref exp(r/β), and descent ends there",
        "`agro prove agro`; [figure1](../figure1/README.md)",
    ),
    Statement(
        "Theorem 1: r − β log(π\\*/π_ref) is the same for every response, whoever wrote it",
        "`agro prove agro`; [figure1](../figure1/README.md) (the worst problem ends 3e-16 nats off)",
    ),
    Statement(
        "Theorem 2: π\\* is the only minimum off-policy; on-policy the deterministic policies are minima too",
        "`agro prove agro agro_onpolicy`; [trap](../trap/README.md)",
    ),
    Statement("Lemma 5: β KL(π ‖ π\\*) is the regret in regularized reward", "[trap](../trap/README.md)"),
    Statement(
        "Lemma 3: the gradient of the off-policy loss; its baseline isn't optional", "`agro prove agro`"
    ),
    Statement(
        "Eq. 4: the leave-one-out estimator is unbiased on data of any policy; on-policy it is RLOO's",
        "`agro prove agro rloo`",
    ),
    Statement("Two responses: the squared pairwise loss (CoPG)", "`agro prove copg`"),
    Statement("One response: DRO, with a learned value", "`agro prove dro`"),
    Statement(
        "Eqs. 5 and 6, Proposition 4: the on-policy estimator is unbiased", "`agro prove agro_onpolicy`"
    ),
    Statement(
        "KL-PG with samples of another policy has another fixed point",
        "`agro prove kl_pg`; [figure1](../figure1/README.md) (stalls at .13 to .19 nats)",
    ),
    Statement(
        "Section 6 and B.3: three estimates of the regularizer's gradient agree on fresh samples",
        "`agro prove agro agro_onpolicy`",
    ),
    Statement("The consistency of prefixes, with a learned value", "`agro prove prefix_consistency`"),
    Statement("Preferences: subtracting consistency of two responses gives DPO", "`agro prove dpo`"),
    Statement("Figure 1: AGRO goes to the optimum, KL-PG stalls", "[figure1](../figure1/README.md)"),
)
