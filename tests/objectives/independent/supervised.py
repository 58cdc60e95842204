"""See `independent.base`."""

from __future__ import annotations

from math import fsum

import numpy as np

from independent.base import Case, Result


def sft(case: Case) -> Result:
    """-log-prob, mean over all tokens of the step; a token counts as often as its row's weight says."""
    grad, B = np.zeros(case.logp.shape), len(case.mask)
    places = [(i, t) for i in range(B) for t in range(case.mask.shape[1]) if case.mask[i, t]]
    W = fsum(float(case.weight[i]) for i, _ in places)
    loss = fsum(-float(case.weight[i]) / W * float(case.logp[i, t]) for i, t in places)
    for i, t in places:
        grad[i, t] = -float(case.weight[i]) / W
    return loss, {"logp": grad}
