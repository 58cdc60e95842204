"""Where exact gradient descent goes, and what random tool output does to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from agro.objectives import get
from agro.proof.claims import CLAIMS, Claims
from agro.proof.descent import Path, descend
from agro.proof.enumerable import Enumerable, Space, optimum
from agro.proof.expectation import Data
from agro.proof.measuring import BETA, EXACT, FAR, INSTANCES, Row, data_of, options_of, problem, row

SEEDS = {"reference": 2, "elsewhere": 9}  # of the tables that descents begin at


def tools(name: str, claims: Claims) -> Iterator[Row]:
    """A tool's random output between two actions: how far the fixed point is from the optimum, and without the randomness."""
    if name != "agro" or claims is not CLAIMS[name][0]:
        return
    space = Space(2, 3, 6, observed=(1,))  # action, output, action
    reference = Enumerable.table(space, 2)
    reward = torch.rand(6, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for output, certain in (("random", 0.5), ("certain", 1.0)):
        chance = torch.tensor(
            [certain if y[1] == 0 else 1 - certain for y in space.responses], dtype=torch.float64
        )
        star = _optimum_with_tool(reference, reward, chance)
        start = Enumerable.table(space, 2)
        data = Data(reference, reward, noise=chance.expand(6, -1))
        descend(start, reference, data, star, name, options_of(name, claims), updates=claims.updates)
        off = (chance * start.logp().detach().exp() * (start.logp().detach() - star)).sum(1)
        value, setting = (
            off.median().item(),
            f"{output} output between two actions, data from reference, median of 6 instances",
        )
        if output == "random":
            yield row(
                name,
                "a tool's random output moves the fixed point off the optimum",
                setting,
                claims,
                value,
                least=1e-4,
            )
        else:
            yield row(
                name, "KL to the optimum at the end of descent", setting, claims, max(value, 0.0), most=EXACT
            )


def _optimum_with_tool(reference: Enumerable, reward: Tensor, chance: Tensor) -> Tensor:
    """[X,Y] log π* of two actions around an output of two tokens: the first one looks at the expected later value.

    `reward` [X,Y], `chance` [Y] of the output, over the responses of Space(2, 3).
    """
    X, logp = len(reward), reference.logp_next().detach()
    after = [i for i, context in enumerate(reference.space.contexts) if len(context) == 2]
    last = logp[:, after].view(X, 2, 2, 2)  # action, output, action
    r = reward.view(X, 2, 2, 2)
    later = BETA * (last + r / BETA).logsumexp(-1)  # the value after the output
    expected = (later * chance.view(2, 2, 2)[:, :, 0]).sum(-1)
    first = (logp[:, 0] + expected / BETA).log_softmax(-1)
    second = (last + r / BETA).log_softmax(-1)
    return (first[:, :, None, None] + second).reshape(X, 8)


def ends(name: str, claims: Claims) -> Iterator[Row]:
    """Where exact gradient descent goes: KL(π ‖ π*), from π_ref on data of each behaviour, and from elsewhere."""
    on_only = "fresh" in get(name).needed(options_of(name, claims))
    wheres = ("policy",) if on_only else ("policy", "reference", "uniform", "stale", "lacks support")
    for where, start in (
        *((w, "reference") for w in wheres),
        ("policy" if on_only else "reference", "elsewhere"),
    ):
        claim = claims.on_policy if where == "policy" else claims.off_policy
        claim = "unknown" if where == "lacks support" else claim
        last = end(name, claims, where, start).distance[-1]
        value = (last.max() if claim == "optimum" else last.median()).item()
        which = "worst" if claim == "optimum" else "median"
        # What a policy hardly ever samples it learns slowly: from afar on its own samples it is on its way.
        near = EXACT if (where, start) != ("policy", "elsewhere") else 1e-3
        yield row(
            name,
            "KL to the optimum at the end of descent",
            f"data from {where}, start at {start}, {claims.updates} updates, {which} of {INSTANCES.prompts} instances",
            claims,
            max(value, 0.0),
            most=near if claim == "optimum" else None,
            least=FAR if claim == "elsewhere" and where != "policy" else None,
        )


@cache
def end(name: str, claims: Claims, where: str, start: str = "reference") -> Path:
    """Descent on data of that behaviour."""
    if where == "policy":
        begun = Enumerable.table(INSTANCES, SEEDS[start])
        return _descent(name, claims, begun, begun)
    descents, path = _on_others(name, claims)
    first = descents.index((where, start)) * INSTANCES.prompts
    return replace(path, distance=path.distance[:, first : first + INSTANCES.prompts])


@cache
def _on_others(name: str, claims: Claims) -> tuple[list[tuple[str, str]], Path]:
    """(behaviour, start) of all descents on data that stay, and their path: prompts of one table, which don't feel each other."""
    behaviors = problem(INSTANCES)[2]
    descents = [*((where, "reference") for where in behaviors), ("reference", "elsewhere")]
    begun = Enumerable.joined([Enumerable.table(INSTANCES, SEEDS[start]) for _, start in descents])
    return descents, _descent(
        name, claims, begun, Enumerable.joined([behaviors[where] for where, _ in descents])
    )


def _descent(name: str, claims: Claims, begun: Enumerable, behavior: Enumerable) -> Path:
    """Of a table whose prompts are the random problems, once or several times."""
    _, reference, _, reward = problem(INSTANCES)
    times = begun.space.prompts // INSTANCES.prompts
    reference, reward = Enumerable.joined([reference] * times), reward.repeat(times, 1)
    star = optimum(reference.logp().detach(), reward, BETA)
    data = data_of(behavior, reward, reference, judged=claims.judged)
    options, n = options_of(name, claims), claims.n[0]
    return descend(begun, reference, data, star, name, options, n=n, updates=claims.updates)
