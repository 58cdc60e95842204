"""Systems whose essential thing is an equation: what the objective's gradient is and where it ends, by
enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from agro.proof.claims import claims_of
from agro.proof.ends import ends, own_ends
from agro.proof.enumerable import Space, kl
from agro.proof.formulas import Situation
from agro.proof.measuring import BETA, EXACT, INSTANCES, ProofRow, Subject, problem
from agro.proof.passport import expectations
from reproductions.systems.row import Row
from reproductions.systems.systems import SYSTEMS

GRADIENT = "gradient less its source's"
END = "KL(π ‖ π*) where exact descent ends, nats"
SHIFTED = "a mean shifted by β"
EQUATIONS = {system.name: system.equations for system in SYSTEMS if system.equations}


def rows(folder: Path) -> Iterator[Row]:
    for system, names in EQUATIONS.items():
        for name in names:
            yield from _equation(system, name)
    yield from _token_level()
    yield from _shifted()


def _equation(system: str, name: str) -> list[Row]:
    """Of the objective's first claims: its expected gradient and, where it is claimed, its end."""
    subject = Subject(name, claims_of(name)[0])
    worst = _worst(list(expectations(subject)))
    found = [Row(system, f"`agro prove {name}`", GRADIENT, worst, EXACT, "at most")]
    if subject.claims.ends == "optimum" and subject.claims.updates:
        worst = _worst(list(ends(subject)))
        found += [Row(system, f"`agro prove {name}`", END, worst, 1e-3, "at most")]
    return found


def _shifted() -> list[Row]:
    """Where descent goes, and how far that is from μ, with the shift and without."""
    subjects = [Subject(name, claims_of(name)[0]) for name in ("kimi", "kimi_shifted")]
    worst, distances = _worst(list(own_ends(subjects[1]))), []
    policy, reference, behaviors, reward = problem(INSTANCES)
    mu = behaviors["reference"]
    situation = Situation(policy, reference, mu, reward, BETA, 2)
    for subject in subjects:
        assert subject.claims.end is not None
        distances.append(float(kl(subject.claims.end.of(situation), mu.logp().detach()).mean()))
    claimed = "KL to β log(π/μ) + ν π/μ = (1 − 1/n)(r − E_μ r) + β where exact descent ends, worst, in nats"
    nearer = "KL(π ‖ μ) there, times that without the shift"
    return [
        Row(SHIFTED, "`agro prove kimi_shifted`", claimed, worst, 1e-6, "at most"),
        Row(SHIFTED, "`kimi_shifted` and `kimi`", nearer, distances[1] / distances[0], 0.9, "at most"),
    ]


def _worst(proved: list[ProofRow]) -> float:
    """The largest value of those that have an upper bound."""
    return max(row.value for row in proved if row.side == "at most")


def _token_level() -> list[Row]:
    """The estimates of section 6, on fresh samples, against the gradient of eq. 4."""
    found = []
    for claims in claims_of("agro"):
        estimate = claims.options.get("regularizer")
        if estimate:
            worst = _worst(list(expectations(Subject("agro", claims))))
            mechanism = f'`agro`, `regularizer = "{estimate}"`'
            found += [Row("AGRO at the token level", mechanism, GRADIENT, worst, EXACT, "at most")]
    plain, integrated = (_spread(estimate) for estimate in ("sequence", "reference"))
    consequence = "variance of a pair's gradient on samples of π_ref, as a share of eq. 4's (r = 0, β = 1)"
    mechanism = '`agro`, `regularizer = "reference"`'
    share = integrated / plain
    return [*found, Row("AGRO at the token level", mechanism, consequence, share, 0.5, "at most")]


def _spread(estimate: str) -> float:
    """The trace of the covariance of a pair's gradient, over all pairs of responses of two tokens."""
    policy, reference, _, reward = problem(Space(3, 2, 1))
    claims = replace(claims_of("agro")[0], options={"beta": 1.0, "regularizer": estimate})
    subject = Subject("agro", claims)
    batch = subject.batch(reference, torch.zeros_like(reward), reference, 2)
    gradients, chances = [], []
    for number in range(batch.n_groups):
        pair = batch.rows((batch.group == number).nonzero()[:, 0])
        chances.append(pair.weight[0])
        gradients.append(subject.gradient(policy, reference, pair.replace(weight=torch.ones(2).double())))
    p_G1, g_GW = torch.stack(chances)[:, None], torch.stack(gradients)
    mean_W = (p_G1 * g_GW).sum(0) / p_G1.sum()
    return float((p_G1 * (g_GW - mean_W).square()).sum() / p_G1.sum())
