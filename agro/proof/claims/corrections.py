"""Claims of agro.objectives.corrections."""

from __future__ import annotations

from dataclasses import replace

from agro.proof import clipped_formulas as formulas
from agro.proof.claim import DESCENT, Claims
from agro.proof.families import BEHAVIOR, of_ratio
from agro.proof.formulas import Corrected


def _corrected(level: str, rule: str, least: float, most: float | None) -> tuple[Claims, ...]:
    """Of a preset, whose options say the same. The policy when the batch was drawn isn't the sampler."""
    by = Corrected("mismatch", most, least, level, rule)  # type: ignore[arg-type]
    of = of_ratio(by(formulas.grpo), (*BEHAVIOR, "old_logp"), updates=DESCENT)
    return (replace(of, drifted=True),)


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "tis": _corrected("token", "truncate", 0.0, 2.0),
    "mis": _corrected("sequence", "mask", 0.0, 3.0),
    "icepop": _corrected("token", "mask", 0.5, 5.0),
    "decoupled_ppo": _corrected("token", "truncate", 0.0, None),
}
