"""Every objective on batches of any shape.

Ragged groups and lengths, log-probs down to −1e4, equal rewards, one group to 30.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import VARIANTS, by_objective, draw, evaluate, expected, least, least_groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@by_objective(VARIANTS)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10_000),
    most=st.integers(3, 7),
    episodes=st.booleans(),
    shape=st.fixed_dictionaries(
        {
            "groups": st.one_of(st.integers(1, 6), st.just(30)),
            "length": st.integers(2, 12),
            "rewards": st.sampled_from(["normal", "binary", "equal"]),
            "spread": st.sampled_from([0.0, 0.3, 3.0]),
            "far": st.sampled_from([0.0, 1.0, 1e4]),
        }
    ),
)
def test_the_gradient_is_that_of_plain_loops(
    name: str,
    options: dict[str, Any],
    needs: set[str],
    seed: int,
    most: int,
    episodes: bool,
    shape: dict[str, Any],
) -> None:
    """Relative to the largest number of the batch, as sums of numbers of 1e4 round in their last places."""
    episodes = episodes and "rows" not in needs
    shape["groups"] = max(shape["groups"], least_groups(options))
    case = draw(seed, sizes=(least(needs), most), episodes=episodes, **shape)
    out = evaluate(case, name, options)
    loss, grads = expected(case, name, options)
    size = max(1.0, abs(loss), *(np.abs(g).max() for g in grads.values()))
    assert abs(out.loss - loss) <= 1e-9 * size
    for stream, grad in grads.items():
        assert np.isfinite(out.grads[stream]).all()
        assert stream == "value" or (out.grads[stream][~case.mask] == 0).all()
        assert np.abs(out.grads[stream] - grad).max() <= 1e-9 * size * max(1.0, shape["far"])
