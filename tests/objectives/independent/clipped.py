"""See `independent.base`."""

from __future__ import annotations

from math import exp, fsum

from independent.base import Case, Pair, Place, Response, Result, clipped, over_tokens


def grpo(
    case: Case,
    ratio: str = "behavior",
    clip: Pair = (0.2, 0.2),
    dual_clip: float | None = None,
    std: bool = True,
    average: str | float = "response",
) -> Result:
    """Tokens: -min(w A, clamp(w, 1-ε₁, 1+ε₂) A), w = exp(l - b); at most -c A where A < 0.

    The mean in a response, in a group, over groups. A = (r - r̄) / (std + 1e-6). d(w A)/dl = w A where the
    first branch of the min is taken, 0 where the clamp is taken and limits w, and 0 where -c A is taken.
    """

    def token(A: float, _: Response, place: Place) -> Pair:
        return clipped(case.ratio(place, ratio), A, 1 - clip[0], 1 + clip[1], dual_clip)

    return over_tokens(case, token, std, average)


def dr_grpo(case: Case, average: float) -> Result:
    return grpo(case, std=False, average=average)


def dapo(case: Case) -> Result:
    """One mean over the tokens of all responses; the ratio may go from 0.8 to 1.28."""

    def token(A: float, _: Response, place: Place) -> Pair:
        w = case.ratio(place)
        if (A > 0 and w > 1.28) or (A < 0 and w < 0.8):
            return -(1.28 if A > 0 else 0.8) * A, 0.0
        return -w * A, -w * A

    return over_tokens(case, token, True, "token")


def ppo_dual_clip(case: Case) -> Result:
    """A > 0: w A up to 1.2 A. A < 0: w A for w from 0.8 to 3, and no slope outside."""

    def token(A: float, _: Response, place: Place) -> Pair:
        w = case.ratio(place)
        kept = min(w, 1.2) if A > 0 else min(max(w, 0.8), 3.0)
        return -kept * A, -w * A if kept == w else 0.0

    return over_tokens(case, token, True, "token")


def gspo(
    case: Case,
    ratio: str = "behavior",
    clip: Pair = (3e-4, 4e-4),
    std: bool = True,
    average: str | float = "response",
) -> Result:
    """-min(s A, clamp(s) A), s = exp(mean_t (l_t - b_t)), the same at each token.

    As ds/dl_t = s/T, T tokens have the slope s A in l_t; 0 where the clamp is taken and limits s.
    """

    def token(A: float, y: Response, _: Place) -> Pair:
        s = exp(case.summed_log_ratio(y, ratio) / len(y.places))
        return clipped(s, A, 1 - clip[0], 1 + clip[1])

    return over_tokens(case, token, std, average)


def luspo(case: Case) -> Result:
    """T times GSPO's loss of a response: a token's slope is -s A / n, without T."""
    return gspo(case, average=1.0)


def gmpo(case: Case, ratio: str = "behavior", clip: Pair = (0.4, 0.4), std: bool = True) -> Result:
    """-A s, s = exp(mean_t c_t), c_t = l_t - b_t, at most clip[1] where A > 0, at least -clip[0] where A < 0.

    ds/dl_t = s/T where c_t isn't limited, else 0.
    """

    def token(A: float, y: Response, place: Place) -> Pair:
        logs = {p: case.log_ratio(p, ratio) for p in y.places}
        limited = {p: min(e, clip[1]) if A > 0 else max(e, -clip[0]) for p, e in logs.items()}
        s = exp(fsum(limited.values()) / len(y.places))
        return -A * s, -A * s if limited[place] == logs[place] else 0.0

    return over_tokens(case, token, std, "response")
