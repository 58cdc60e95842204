"""Whether a server has the weights that were published: its log-probs of fixed tokens against the learner's.

A push may answer 200 to every request and leave a tied output layer as it was (.8 nats off), load half of a
checkpoint (1.2), add an adapter to another model (6.3), or nothing at all. By rounding, log-probs in float32
differ by 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from pydantic import ValidationError

from agro.errors import Refused
from agro.models.published import ROUNDING, Probe
from agro.rollout.engines.connection import Connection
from agro.rollout.engines.dialects import Dialect
from agro.rollout.engines.replies import wrong_field

Scores = list[list[float]]  # of the sequences of a probe, for each token but the first

LIKELY = {
    "reload": (
        "a tied output layer that the server left as it was, half of a checkpoint, or another model. What to "
        "do: start the server again with the run's model, or use engine.push = transfer"
    ),
    "transfer": (
        "a backend that doesn't load all weights, or another model. What to do: start the server again with "
        "the run's model and the backend of examples/vllm_weights"
    ),
    "adapter": (
        "an adapter on another model than it is trained on, one of the same name, or weights that were "
        "pushed to the model itself. What to do: start the server again with the run's policy.model"
    ),
}


@dataclass(frozen=True)
class Gap:
    """How far log-probs are apart, nats a token."""

    mean: float
    largest: float
    tokens: int


async def score(server: Connection, dialect: Dialect, probe: Probe, served: str | None) -> Scores:
    """The server's log-probs. Raises `Lost`, and `Refused` where it doesn't answer with log-probs."""
    try:
        return [
            await server.post(
                dialect.scoring_path, dialect.scoring(ids, served), partial(dialect.scores, ids=ids)
            )
            for ids in probe.ids
        ]
    except Refused:
        raise
    except ValidationError as error:
        problem = wrong_field(error.errors()[0], dialect.advice)
    except ValueError as error:
        problem = str(error)
    raise Refused(f"{server.url}{dialect.scoring_path}: log-probs of given tokens: {problem}")


def gap(a: Scores, b: Scores) -> Gap:
    off = np.abs(np.concatenate(a) - np.concatenate(b))
    return Gap(float(off.mean()), float(off.max()), off.size)


def unfit(found: Gap, allowed: float, way: str, scores: Scores, before: Scores | None) -> str:
    """Why a server isn't used: its scores are further from the learner's than rounding explains.

    `before`: its scores after the push before this one, where there was one.
    """
    likely = LIKELY[way]
    if found.mean <= ROUNDING[True]:
        likely = (
            "another type of numbers. What to do: start vLLM with --dtype as policy.dtype (by default it "
            f"serves float32 in half precision), or set engine.push_error = {ROUNDING[True]:g}"
        )
    if before is not None and gap(scores, before).largest == 0:
        likely = (
            "nothing arrived, since its log-probs are those of before the push. What to do: see the server's "
            "log; whether it can read the folder RUN/weights"
        )
    return (
        f"after the push its log-probs of {found.tokens} fixed tokens are {found.mean:.3g} nats a token off "
        f"those of the trainer (at most {found.largest:.3g}), above engine.push_error = {allowed:g}. Likely: "
        f"{likely}"
    )
