"""Chunked streams against log_softmax of all logits at once, in value and gradient, and their memory; and
passes that compute common beginnings once.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from rounding import rounding
from torch.profiler import ProfilerActivity, profile

from agro.errors import Refused
from agro.models.logprobs import STREAMS, Head, keys, token_streams, uniforms
from agro.models.packing import PackedRows
from agro.models.policy import Policy
from agro.models.reference import frozen
from agro.objectives.needs import PROPOSAL, PROPOSAL_MEAN, changed
from agro.types import KeptSets

B, T, H, V = 3, 11, 8, 37
KAPPA = 1.5
TEMPERED = tuple(changed(need, temperature=KAPPA) for need in (PROPOSAL, PROPOSAL_MEAN))
EVERY = (*STREAMS[:3], *TEMPERED, *STREAMS[5:])


@pytest.fixture(params=[8, 1000])
def tile(request, monkeypatch):
    """Tokens of a tile: five tiles, the last of them with five tokens, or one."""
    monkeypatch.setattr("agro.models.logprobs.TILE", request.param)
    return request.param


def arrays(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(s, generator=g).to(dtype) for s in ((B, T, H), (V, H), (V,)))
    tokens = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand((B, T), generator=g) < 0.6
    mask[:, 0] = False
    return hidden, weight, bias, tokens, mask


def tolerance(dtype, *expected):
    return rounding(*expected) if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}


def naive(hidden, head, tokens, temperature, reference, inside=None):
    """Every stream [B,T-1] at positions 1 … T-1, from all logits, with autograd through all of it.

    Log-probs are those of logits that are -inf where `inside` isn't set.
    """

    def logits(hidden, head):
        z = torch.nn.functional.linear(hidden[:, :-1], head.weight, head.bias)
        z = z.double() * head.scale  # rounding here would be as large as the tolerance
        z = z if head.cap is None else torch.tanh(z / head.cap) * head.cap
        return z / temperature

    own, other = logits(hidden, head).log_softmax(-1), logits(*reference).log_softmax(-1)
    kept = own if inside is None else own.masked_fill(~inside[:, 1:], -torch.inf).log_softmax(-1)
    q = torch.softmax(own.detach() / KAPPA, -1)
    return {
        "proposal": q.gather(2, tokens[:, 1:, None])[..., 0],
        "proposal_mean": (q * own).sum(-1),
        "logp": kept.gather(2, tokens[:, 1:, None])[..., 0],
        "ref_mean": (other.exp() * (own - other)).sum(-1),
        "ref_square": (other.exp() * (own - other).square() / 2).sum(-1),
        "normalizer": logits(hidden, head).logsumexp(-1),
        "entropy": -(own.exp() * own).sum(-1),
        "kl": (own.exp() * (own - other)).sum(-1),
    }


def check_streams(want, settings, chunk, *, with_bias=True, keeps=False):
    """Values, and the gradient of a sum with random factors, against `naive`; over kept sets or all tokens.

    `settings`: dtype, temperature, cap and scale.
    """
    dtype, temperature, cap, scale = settings
    hidden, weight, bias, tokens, mask = arrays(dtype)
    other = arrays(dtype, seed=1)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)][: 3 if with_bias else 2]
    head = Head(weight, bias if with_bias else None, scale, cap)
    reference = (other[0], Head(other[1], None, scale, cap))
    kept, inside = kept_at_random(tokens, mask) if keeps else (None, None)
    outputs = (hidden, head, kept) if keeps else (hidden, head)
    found = token_streams(
        outputs, tokens, mask, want=want, temperature=temperature, chunk=chunk, reference=reference
    )
    expected = naive(hidden, head, tokens, temperature, reference, inside)
    assert set(found) == set(want)
    at, total, right = mask[:, 1:], 0.0, 0.0
    for i, s in enumerate(want):
        assert found[s].dtype == dtype
        assert torch.equal(found[s].isnan(), ~mask)
        inner = expected[s][at]
        torch.testing.assert_close(found[s][:, 1:][at], inner.to(dtype), **tolerance(dtype, inner))
        if s != "proposal":  # which is a constant
            factor = torch.randn((B, T), dtype=dtype, generator=torch.Generator().manual_seed(i))
            total = total + (found[s] * factor)[mask].sum()
            right = right + (expected[s] * factor[:, 1:])[at].sum()
    exact = torch.autograd.grad(right, leaves)
    for a, b in zip(torch.autograd.grad(total, leaves), exact):
        torch.testing.assert_close(a, b, **tolerance(dtype, *exact))


@pytest.mark.parametrize(
    "want",
    [
        *(("logp",), ("entropy",), ("kl",), TEMPERED, ("logp", *TEMPERED), STREAMS[5:7]),
        *(("logp", "normalizer"), EVERY),
    ],
)
@pytest.mark.parametrize(
    ("settings", "chunk", "with_bias"),
    [
        ((torch.float32, 1.0, None, 1.0), 4, False),
        ((torch.float32, 0.5, None, 1.0), 1, True),
        ((torch.float32, 1.7, 3.0, 0.25), 1000, True),
        ((torch.float64, 0.7, 3.0, 0.25), 3, True),
        ((torch.float64, 1.0, None, 2.0), 4, False),
    ],
)
@pytest.mark.usefixtures("tile")
def test_streams_and_gradients_are_those_of_all_logits(want, settings, chunk, with_bias):
    """Whatever the size of a chunk."""
    check_streams(want, settings, chunk, with_bias=with_bias)


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.usefixtures("tile")
def test_drawn_tokens_take_the_place_of_q(chunk):
    """In value and gradient: the tokens on which the uniform numbers fall in the distribution function of
    q."""
    hidden, weight, bias, tokens, mask = arrays(torch.float64)
    K, leaves = 50, [x.requires_grad_() for x in (hidden, weight, bias)]
    drawn = {"temperature": KAPPA, "draws": K, "seed": 7.0}
    want = tuple(changed(need, **drawn) for need in (PROPOSAL, PROPOSAL_MEAN))
    found = token_streams((hidden, Head(weight, bias)), tokens, mask, want=want, temperature=0.7, chunk=chunk)
    z = torch.nn.functional.linear(hidden[:, :-1], weight, bias)[mask[:, 1:]] / 0.7
    ends = torch.softmax(z.detach() / KAPPA, -1).cumsum(-1)
    drawn = torch.searchsorted(ends, uniforms(keys(tokens, 7.0)[mask.numpy()], K), right=True)
    of_token = (drawn == tokens[mask][:, None]).double().mean(1)
    mean = z.log_softmax(-1).gather(1, drawn).mean(1)
    torch.testing.assert_close(found["proposal"][mask], of_token, rtol=0, atol=1e-15)
    torch.testing.assert_close(found["proposal_mean"][mask], mean, rtol=1e-12, atol=1e-12)
    factor = torch.randn(mean.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad((found["proposal_mean"][mask] * factor).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((mean * factor).sum(), leaves)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_draws_have_the_mean_of_q_and_follow_tokens_and_seed():
    """Of 40 seeds of 1,000 draws: the standard error of a share is at most ½/√40000 = 0.0025."""
    hidden, weight, bias, tokens, mask = arrays(torch.float64)
    outputs = (hidden, Head(weight, bias))
    exact = token_streams(outputs, tokens, mask, want=(PROPOSAL,))["proposal"][mask]
    needs = [changed(PROPOSAL, draws=1000, seed=float(seed)) for seed in range(40)]
    drawn = [token_streams(outputs, tokens, mask, want=(need,))["proposal"][mask] for need in needs]
    torch.testing.assert_close(torch.stack(drawn).mean(0), exact, rtol=0, atol=0.01)
    assert not torch.equal(drawn[0], drawn[1])
    known = keys(torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 3]]), 0.0)
    assert (known[0] == known[1]).all()  # of the tokens before
    assert (known[0, :2] == known[2, :2]).all()
    assert known[0, 2] != known[2, 2]


def kept_at_random(tokens, mask):
    """The token and others, in half of the rows and places; [B,T,V] says which, true for all elsewhere."""
    g = torch.Generator().manual_seed(5)
    inside = torch.rand((B, T, V), generator=g) < 0.3
    inside.scatter_(2, tokens[..., None], True)
    inside[::2] = True
    inside[:, ::4] = True
    count = torch.where(inside.all(2) | ~mask, 0, inside.sum(2))
    return KeptSets(inside[count > 0].nonzero()[:, 1], count), inside


@pytest.mark.parametrize("want", [("logp",), EVERY])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(
    "settings",
    [(torch.float64, 0.7, 3.0, 0.25), (torch.float64, 1.0, None, 1.0), (torch.float32, 1.7, None, 1.0)],
)
@pytest.mark.usefixtures("tile")
def test_log_probs_over_kept_sets_are_those_of_masked_logits(want, chunk, settings):
    """Others don't change."""
    check_streams(want, settings, chunk, keeps=True)


def test_kept_sets_outside_of_the_mask_are_ignored():
    hidden, weight, bias, tokens, mask = arrays()
    kept, _ = kept_at_random(tokens, mask)
    fewer = mask & (torch.rand((B, T), generator=torch.Generator().manual_seed(3)) < 0.5)
    whole = token_streams((hidden, Head(weight, bias), kept), tokens, mask)["logp"]
    part = token_streams((hidden, Head(weight, bias), kept), tokens, fewer)["logp"]
    torch.testing.assert_close(part[fewer], whole[fewer], **rounding(whole[fewer]))


def test_kept_logits_change_no_bit(monkeypatch):
    """None of five tiles, some of them, also where the last, which is smaller, would fit alone, and all."""
    monkeypatch.setattr("agro.models.logprobs.TILE", 8)
    gradients = []
    for kept in (0, *range(1, 3 * B * T * V, 23)):
        monkeypatch.setattr("agro.models.logprobs.MAX_KEPT_LOGITS", kept)
        hidden, weight, bias, tokens, mask = arrays()
        leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
        token_streams((hidden, Head(weight, bias)), tokens, mask, chunk=3)["logp"][mask].sum().backward()
        gradients.append([x.grad for x in leaves])
    for found, expected in itertools.product(gradients[1:], gradients[:1]):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_log_probs_of_a_bfloat16_model_are_normalized_in_float32():
    hidden, weight, _, tokens, mask = arrays(torch.bfloat16)
    found = token_streams((hidden, Head(weight)), tokens, mask)["logp"][:, 1:][mask[:, 1:]]
    logits = torch.nn.functional.linear(hidden, weight)[:, :-1].float()
    expected = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0][mask[:, 1:]]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, **rounding(expected))


def test_the_gradient_of_a_bfloat16_head_does_not_erode_over_chunks():
    """Summed in bfloat16, 511 chunks of one position would lose the small ones: 2e-2 and more."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=g) for s in ((1, 512, H), (V, H), (V,)))
    tokens, mask = torch.randint(0, V, (1, 512), generator=g), torch.arange(512)[None] > 0
    grads = []
    for dtype, chunk in ((torch.bfloat16, 1), (torch.float64, 1000)):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (weight, bias)]
        out = token_streams((hidden.bfloat16().to(dtype), Head(*leaves)), tokens, mask, chunk=chunk)["logp"]
        out[mask].sum().backward()
        assert all(x.grad.dtype == dtype for x in leaves)
        grads.append([x.grad.double() for x in leaves])
    for half, whole in zip(*grads):
        assert (half - whole).norm() / whole.norm() < 6e-3  # bfloat16 keeps 8 bits: 4e-3


def test_no_gradient_reaches_the_reference_or_a_frozen_head():
    hidden, weight, _, tokens, mask = arrays()
    ref_hidden, ref_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    hidden.requires_grad_()
    out = token_streams(
        (hidden, Head(weight)), tokens, mask, want=["kl"], reference=(ref_hidden, Head(ref_weight))
    )
    (out["kl"][mask] * 2).sum().backward()
    assert hidden.grad is not None
    assert ref_hidden.grad is ref_weight.grad is weight.grad is None


@pytest.mark.parametrize(("own", "other"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_reference_may_be_of_another_precision(own, other):
    """Its logits are rounded to the policy's precision: value and gradient are those of that rounding."""
    hidden, weight, _, tokens, mask = arrays(own)
    ref_hidden, ref_weight, *_ = arrays(other, seed=1)
    reference = (ref_hidden, Head(ref_weight))
    hidden.requires_grad_()
    found = token_streams((hidden, Head(weight)), tokens, mask, want=["kl"], reference=reference)["kl"]
    expected = naive(hidden, Head(weight), tokens, 1.0, reference)["kl"]
    assert found.dtype == own
    torch.testing.assert_close(found[mask], expected[mask[:, 1:]].to(own), **rounding(expected))
    got, right = (torch.autograd.grad(x.sum(), hidden)[0] for x in (found[mask], expected[mask[:, 1:]]))
    torch.testing.assert_close(got, right, **rounding(right))


def test_no_memory_is_taken_for_the_gradient_of_a_frozen_head(monkeypatch):
    """[V,H], which with a large vocabulary is the largest tensor there is."""
    hidden, weight, bias, tokens, mask = arrays()
    asked, plain = [], torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x, **how: (asked.append(x.shape), plain(x, **how))[1])
    out = token_streams((hidden.requires_grad_(), Head(weight, bias)), tokens, mask)
    out["logp"][mask].sum().backward()
    assert asked
    assert not {weight.shape, bias.shape} & set(asked)


def test_an_empty_mask_gives_no_value():
    hidden, weight, _, tokens, mask = arrays()
    assert token_streams((hidden, Head(weight)), tokens, mask & False)["logp"].isnan().all()


def test_what_cannot_be_computed_is_refused():
    hidden, weight, _, tokens, mask = arrays()
    head = Head(weight)
    with pytest.raises(ValueError, match="a first token has no log-prob"):
        token_streams((hidden, head), tokens, mask | True)
    with pytest.raises(ValueError, match=r"expected some of logp, entropy, kl, .*got value"):
        token_streams((hidden, head), tokens, mask, want=["value"])
    with pytest.raises(ValueError, match="needs a reference"):
        token_streams((hidden, head), tokens, mask, want=["kl"])
    with pytest.raises(Refused, match="vocabulary of 37 tokens, got 36"):
        token_streams((hidden, head), tokens, mask, want=["kl"], reference=(hidden, Head(weight[1:])))


def test_a_reference_is_not_read_where_no_kl_is_wanted():
    hidden, weight, _, tokens, mask = arrays()
    unlike = (hidden[..., 1:], Head(weight[1:, 1:]))
    found = token_streams((hidden, Head(weight)), tokens, mask, reference=unlike)
    assert torch.equal(found["logp"][mask], token_streams((hidden, Head(weight)), tokens, mask)["logp"][mask])


@pytest.mark.parametrize(
    ("config", "scale", "cap"),
    [
        ({}, 1.0, None),
        ({"logit_scale": 0.5}, 0.5, None),
        ({"logits_scaling": 4.0}, 0.25, None),
        ({"lm_head_multiplier": 3.0}, 3.0, None),
        # no such architecture
        ({"logit_scale": 0.5, "logits_scaling": 4.0, "lm_head_multiplier": 3.0}, 0.375, None),
        ({"logit_scale": None, "final_logit_softcapping": 30.0}, 1.0, 30.0),
    ],
)
def test_the_head_takes_scale_and_cap_from_the_configuration(config, scale, cap):
    """Cohere and Falcon-H1 multiply, Granite divides by logits_scaling, and Gemma caps."""
    linear = torch.nn.Linear(H, V)
    text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))
    head = Head.of(SimpleNamespace(get_output_embeddings=lambda: linear, config=text))
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert (head.scale, head.cap) == (scale, cap)


def peak_bytes(work) -> int:
    """The largest tensor memory that `work` adds at once to what was there, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes))


def test_peak_bytes_sees_all_logits_of_the_naive_way():
    hidden, weight = torch.randn(100, 4), torch.randn(5000, 4)
    assert peak_bytes(lambda: torch.log_softmax(hidden @ weight.T, -1)) >= 2 * 100 * 5000 * 4


def test_memory_beside_logits_that_are_kept_is_below_a_tenth_of_all(causal, tokenizer, monkeypatch):
    """V = 150,000 and T = 1,024: the model's forward and backward with every stream.

    Gradients of the weights are included.
    """
    vocabulary, length = 150_000, 1024
    sizes = {"vocab_size": vocabulary, "hidden_size": 16, "head_dim": 4, "num_hidden_layers": 1}
    policy = Policy(
        causal("Llama", **sizes, max_position_embeddings=length, tie_word_embeddings=True), tokenizer
    )
    reference = frozen(policy)
    tokens = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(length)[None] > 0

    def work():
        out = policy.streams(tokens, torch.tensor([length]), mask, STREAMS, reference)
        sum(v[mask].sum() for v in out.values()).backward()

    kept = 1 << 22
    monkeypatch.setattr("agro.models.logprobs.MAX_KEPT_LOGITS", kept)
    assert peak_bytes(work) <= length * vocabulary * 4 / 10 + 4 * kept
    assert all(p.grad is not None for p in policy.model.parameters())


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
