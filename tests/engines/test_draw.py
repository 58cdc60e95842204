"""Truncation against hand-made cases and transformers' own, the inverse distribution function, and the noise
that a token is drawn by.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rounding import rounding
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agro.config import RunConfig, SamplerConfig
from agro.errors import Refused
from agro.rollout.engines import draw as drawing
from agro.rollout.engines.draw import draw, kept_sets, truncate, uniforms

PROBS = [0.05, 0.4, 0.1, 0.25, 0.2]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.84}, [1, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.26}, [1, 3, 4]),
        ({"min_p": 0.24}, [1, 2, 3, 4]),
        ({"min_p": 1.0}, [1]),
        # of the three left by top-k, 0.4 and 0.25 are 76 % of what is left, but 65 % of everything
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        ({"top_p": 0.7}, [1, 3, 4]),
    ],
)
def test_what_truncation_keeps(options, tokens):
    z = truncate(torch.tensor([PROBS]).log(), SamplerConfig(**options))
    assert torch.nonzero(z[0].isfinite())[:, 0].tolist() == tokens


def test_ties_with_the_kth_token_are_kept():
    z = truncate(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), SamplerConfig(top_k=2))
    assert z.isfinite().tolist() == [[False, True, True, True, False]]


def test_of_tied_tokens_top_p_keeps_the_first_until_the_mass_is_reached():
    z = truncate(torch.zeros(1, 4), SamplerConfig(top_p=0.5))
    assert z.tolist() == [[0.0, 0.0, -math.inf, -math.inf]]


def test_a_number_added_to_all_logits_of_a_row_changes_nothing():
    z, uniform = torch.tensor([PROBS]).log(), torch.tensor([0.3, 0.3], dtype=torch.float64)
    tokens, logp = draw(torch.cat([z, z - 1000]), uniform, SamplerConfig())
    assert tokens[0] == tokens[1]
    assert logp[0].item() == pytest.approx(logp[1].item(), abs=1e-4)


def test_truncation_is_that_of_transformers():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn((200, 50), generator=g) * 3
    options = SamplerConfig(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
    expected = TemperatureLogitsWarper(0.7)(None, logits.clone())
    for warp in (TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)):
        expected = warp(None, expected)
    found = truncate(logits / 0.7, options)
    assert torch.equal(found == -math.inf, expected == -math.inf)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert 1 < found.isfinite().sum(1).float().mean() < 20


def test_tokens_come_as_often_as_their_probabilities_say():
    n = 20_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logp = draw(torch.tensor([PROBS]).log().expand(n, -1).clone(), uniform, SamplerConfig())
    shares = torch.bincount(tokens, minlength=5) / n
    torch.testing.assert_close(shares, torch.tensor(PROBS), rtol=0, atol=1e-4)
    torch.testing.assert_close(logp, torch.tensor(PROBS).log()[tokens], **rounding(logp))
    assert (logp <= 0).all()


def test_log_probs_are_of_the_truncated_distribution():
    uniform = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    z = torch.tensor([PROBS]).log() * 2  # halving the temperature undoes it
    tokens, logp = draw(z.expand(50, -1).clone() / 4, uniform, SamplerConfig(temperature=0.5, top_k=2))
    assert set(tokens.tolist()) == {1, 3}
    expected = {1: math.log(0.4 / 0.65), 3: math.log(0.25 / 0.65)}
    np.testing.assert_allclose(logp, [expected[t] for t in tokens.tolist()], **rounding(logp))


@pytest.mark.parametrize(
    ("options", "sets"),
    [({"top_k": 2}, [1, 3]), ({"top_p": 0.84}, [1, 3, 4]), ({"min_p": 0.26}, [1, 3, 4]), ({"top_k": 5}, [])],
)
def test_kept_sets_are_ascending_ids_and_empty_for_the_whole_vocabulary(options, sets):
    logits = torch.tensor([PROBS, PROBS[::-1]]).log()
    tokens, _ = draw(logits, torch.tensor([0.0, 0.99], dtype=torch.float64), SamplerConfig(**options))
    first, second = kept_sets(logits)
    assert first.tolist() == sets
    assert second.tolist() == sorted(4 - i for i in sets)
    assert all(len(ids) == 0 or token in ids for ids, token in zip((first, second), tokens, strict=True))


def test_a_token_without_probability_is_never_drawn():
    z = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(3, -1).clone()
    uniform = torch.tensor([0.0, 0.5, (2**51 - 1) / 2**51], dtype=torch.float64)
    tokens, _ = draw(z, uniform, SamplerConfig())
    assert tokens.tolist() == [1, 3, 3]


@pytest.mark.parametrize("vocabulary", [13, 128, 1000])
@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.01, "temperature": 0.7}])
def test_a_draw_in_two_levels_is_that_of_a_sum_over_the_vocabulary(vocabulary, options, monkeypatch):
    """The plain way is a float64 sum over all tokens; 2e-7 is the rounding of a block's float32 sum."""
    monkeypatch.setattr(drawing, "_CACHED", 70 * vocabulary)  # rows are drawn from in several parts
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn((400, vocabulary), generator=g) * 3
    uniform = torch.rand((400, 1), generator=g, dtype=torch.float64)
    sampler = SamplerConfig(**options)
    z = truncate(logits / sampler.temperature, sampler)
    p = z.double().softmax(1)
    ends = p.cumsum(1)
    found, logp = draw(logits, uniform[:, 0], sampler)
    token = found[:, None]
    above, below = ends.gather(1, token) - uniform, uniform - (ends - p).gather(1, token)
    assert above.min() > -2e-7
    assert below.min() > -2e-7
    plain = torch.searchsorted(ends, uniform, right=True)
    assert (plain == token).float().mean() > 0.99
    torch.testing.assert_close(logp.double(), p.gather(1, token).log()[:, 0], **rounding(logp))
    for ids, expected in zip(kept_sets(logits), kept_sets(z), strict=True):
        assert ids.tolist() == expected.tolist()


def test_the_largest_and_the_smallest_noise_draw_tokens_with_mass():
    """In every block the last tokens have none, so that a rest beyond the block's mass would show."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn((500, 700), generator=g) * 3
    logits.view(500, 7, 100)[:, :, 40:] = -math.inf
    logits[:, 640:] = -math.inf
    uniform = torch.full((500,), 1 - 2.0**-51, dtype=torch.float64)
    for noise in (uniform, uniform * 0):
        tokens, _ = draw(logits.clone(), noise, SamplerConfig())
        assert logits.gather(1, tokens[:, None]).isfinite().all()
    assert (tokens == 0).all()


def test_greedy_takes_the_likeliest_token_with_certainty():
    uniform = torch.tensor([0.999], dtype=torch.float64)
    tokens, logp = draw(torch.tensor([PROBS]), uniform, SamplerConfig(temperature=0, top_p=0.5))
    assert (tokens.item(), logp.item()) == (1, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        *(("top_k", -1), ("top_p", 1.1), ("min_p", -0.1), ("max_new", 0), ("batch", 0), ("stop", "end")),
    ],
)
def test_options_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        SamplerConfig(**{field: value})
    with pytest.raises(Refused, match=rf"sampler\.{field}"):
        RunConfig.of({"sampler": {field: value}})


MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """One output of SplitMix64 in plain integers, as its authors publish it (https://prng.di.unimi.it/splitmix64.c)."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_generator_is_splitmix64():
    """The first output for this seed in published test vectors."""
    assert splitmix64(1234567) == 6457827717110365317


def plain_uniform(seed: int, response: int, position: int) -> float:
    gamma, state = 0x9E3779B97F4A7C15, splitmix64(seed & MASK)
    for number in (response, position):
        state = splitmix64((state + gamma * number) & MASK)
    return (state >> 13) / 2**51


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 + 7])  # which counts modulo 64 bits
@pytest.mark.parametrize("responses", [[0], [3], [5, 0, 2**40]])
def test_numbers_are_a_function_of_seed_response_and_position_alone(seed, responses):
    """Neither of neighbors nor of lengths."""
    expected = np.array([[plain_uniform(seed, r, t) for t in range(20)] for r in responses])
    assert np.array_equal(uniforms(seed, responses, 20), expected)
    assert np.array_equal(uniforms(seed, responses, 5, 0), expected[:, :5])
    starts = [900 + i for i in range(len(responses))]
    later = [[plain_uniform(seed, r, start + t) for t in range(3)] for r, start in zip(responses, starts)]
    assert np.array_equal(uniforms(seed, responses, 3, starts), later)


def test_numbers_are_even_and_unrelated():
    u = uniforms(0, range(400), 250)
    assert u.min() >= 0
    assert u.max() < 1
    n = u.size
    counts = np.histogram(u, 100, (0, 1))[0]
    chi_squared = ((counts - n / 100) ** 2).sum() / (n / 100)
    assert chi_squared < 160  # with 99 degrees of freedom: p = 1e-4
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u, uniforms(1, range(400), 250))):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(n)


def test_the_largest_number_stays_below_any_total():
    largest = (2**51 - 1) / 2**51
    for total in (1.0, 1.0 + 2**-52, 0.9999999999999999, 3e5, 1e-300):
        assert largest * total < total
