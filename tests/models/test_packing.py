"""Passes that compute a common beginning once have the log-probs and gradients of padded ones."""

from __future__ import annotations

import pytest
import torch
from rounding import rounding

from agro.models.packing import PackedRows

TOKENS = torch.tensor(
    [
        [4, 5, 6, 7, 8, 9],
        [4, 5, 6, 8, 0, 0],
        [9, 5, 6, 7, 0, 0],
        [4, 5, 6, 7, 8, 9],  # as the first
        [4, 5, 0, 0, 0, 0],  # a beginning of the first
    ]
)
LENGTHS = torch.tensor([6, 4, 4, 6, 2])


def test_each_different_beginning_has_one_position():
    packed = PackedRows.of(TOKENS, LENGTHS)
    # 6 of the first sequence, 1 more of the second, 4 of the third, none of the others.
    assert len(packed.source) == 11
    for row, length in enumerate(LENGTHS):
        numbers = packed.number[row, :length]
        assert torch.equal(packed.gather(TOKENS)[numbers], TOKENS[row, :length])
    assert torch.equal(packed.number[0], packed.number[3])
    assert torch.equal(packed.number[0, :2], packed.number[4, :2])
    assert packed.number[0, 3] != packed.number[2, 3]  # the same token after other ones


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_packed_log_probs_and_gradients_are_the_padded_ones(tiny, name):
    policy = tiny(name)
    assert policy.packs
    seen = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _, ids, __: seen.append(ids[0].numel()))
    mask = (torch.arange(6) > 0) & (torch.arange(6) < LENGTHS[:, None])
    found = {}
    for packs in (True, False):
        policy.packs = packs
        policy.zero_grad()
        logp = policy.streams(TOKENS, LENGTHS, mask)["logp"]
        (logp[mask] * torch.arange(1.0, int(mask.sum()) + 1)).sum().backward()
        found[packs] = logp.detach(), torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert seen == [11, TOKENS.numel()]
    torch.testing.assert_close(found[True][0], found[False][0], **rounding(found[False][0]), equal_nan=True)
    torch.testing.assert_close(found[True][1], found[False][1], **rounding(found[False][1]))


@pytest.mark.parametrize(("name", "changes"), [("Mistral", {"sliding_window": 64}), ("Gemma2", {})])
def test_models_with_other_attention_are_padded(tiny, name, changes):
    """The window is longer than any sequence that is tried."""
    assert not tiny(name, **changes).packs
