"""Random models: what the specification says of their weights."""

from __future__ import annotations

import pytest

from agro.config import NewModel, Policy
from agro.policy import Policy as Loaded


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_weights_have_the_standard_deviation_that_is_asked_for(std):
    spec = NewModel(alphabet="abc", hidden=64, layers=2, heads=2, context=16, initializer_range=std)
    model = Loaded.load(Policy(new=spec, device="cpu")).model
    for weight in (model.model.layers[1].mlp.up_proj.weight, model.model.layers[0].self_attn.q_proj.weight):
        # 4096 or more normal numbers: their standard deviation is known to 1.1 %.
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
