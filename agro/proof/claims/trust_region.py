"""Claims of agro.objectives.trust_region."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agro.proof import clipped_formulas
from agro.proof import trust_region_formulas as formulas
from agro.proof.claim import DESCENT, Claims
from agro.proof.families import BEHAVIOR, OLD, of_ratio
from agro.proof.formulas import Situation

DRAWN = (*BEHAVIOR, "old_logp")


def _of_pairs(*args: Any, **options: Any) -> Claims:
    """Whose mean is over all tokens of the step, which are those of its groups: groups have one size."""
    return replace(of_ratio(*args, **options), n=(2,))


def _drifted(of: Claims) -> Claims:
    return replace(of, drifted=True)


def _deepseek(s: Situation, average: float | str = "response") -> Any:
    return formulas.deepseek(s, 0.8, 1.2, 0.5, False, average)


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "deepseek_v32": (
        of_ratio(_deepseek, updates=DESCENT, beta=0.0),
        replace(
            of_ratio(
                lambda s: _deepseek(s) + s.beta * clipped_formulas.unbiased_k3(s), (*BEHAVIOR, "ref_logp")
            ),
            reference_shift=False,
        ),
        _drifted(
            of_ratio(
                lambda s: formulas.deepseek(s, 0.9, 1.4, 0.2, True, 1.5),
                DRAWN,
                beta=0.0,
                ratio="old",
                clip=(0.1, 0.4),
                off_policy=0.2,
                std=True,
                average=1.5,
            )
        ),
        _of_pairs(lambda s: _deepseek(s, "token"), beta=0.0, average="token"),
    ),
    # Linear in the advantage, so that rewards count with their mean unless they are standardized.
    "kimi_k25": (
        replace(_of_pairs(lambda s: formulas.pulled(s, 1e-3), updates=DESCENT), noise=True),
        of_ratio(lambda s: formulas.pulled(s, 0.3, True, "response"), pull=0.3, std=True, average="response"),
        replace(of_ratio(lambda s: formulas.pulled(s, 0.3, average=1.5), pull=0.3, average=1.5), noise=True),
    ),
    "sapo": (
        of_ratio(formulas.gated, updates=DESCENT, beta=0.0),
        of_ratio(
            lambda s: formulas.gated(s, 0.5, 2.0, False, 1.5),
            OLD,
            beta=0.0,
            ratio="old",
            temperature=(0.5, 2.0),
            std=False,
            average=1.5,
        ),
        _of_pairs(lambda s: formulas.gated(s, average="token"), beta=0.0, average="token"),
    ),
    "dppo": (
        _of_pairs(formulas.divergent, updates=DESCENT, beta=0.0),
        _of_pairs(lambda s: formulas.divergent(s, "kl", 0.05), beta=0.0, divergence="kl", limit=0.05),
        of_ratio(
            lambda s: formulas.divergent(s, "tv", 0.1, True, "response"),
            beta=0.0,
            limit=0.1,
            std=True,
            average="response",
        ),
        of_ratio(lambda s: formulas.divergent(s, average=1.5), beta=0.0, average=1.5),
    ),
    "dppo_kl": (_of_pairs(lambda s: formulas.divergent(s, "kl", 0.05), updates=DESCENT, beta=0.0),),
    "remix": (
        _drifted(_of_pairs(formulas.mixed, DRAWN, updates=DESCENT, beta=0.0)),
        replace(
            _drifted(
                _of_pairs(
                    lambda s: formulas.mixed(s) + s.beta * formulas.convex_kl(s, 0.7),
                    (*DRAWN, "ref_logp"),
                    base_share=0.7,
                )
            ),
            reference_shift=False,
        ),
        _drifted(
            of_ratio(
                lambda s: formulas.mixed(s, 0.1, 0.4, False, "response"),
                DRAWN,
                beta=0.0,
                clip=(0.1, 0.4),
                std=False,
                average="response",
            )
        ),
        _drifted(of_ratio(lambda s: formulas.mixed(s, average=1.5), DRAWN, beta=0.0, average=1.5)),
    ),
}
