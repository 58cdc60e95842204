"""Texts that follow others, with tokenizers that put a space before a text, as SentencePiece does."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from agro.config import SamplerConfig
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines import decoding_rows
from agro.rollout.engines.hf import HF
from agro.rollout.episode import Transcript
from agro.types import Prompt, Sample

CHARACTERS = "0123456789=+.abc"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
STARTS = [f"▁{c}" for c in CHARACTERS]
MERGED = ["==", "4=", "ab"]
KINDS = [("BPE", "legacy"), ("BPE", "first"), ("BPE", "always"), ("Unigram", "first"), ("Unigram", "always")]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}1{{ m.content }}={% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)


def sentencepiece(kind: str, scheme: str) -> Tokenizer:
    """A small tokenizer like Llama 2's ("legacy": its normalizer writes "▁" first), Mistral's or T5's."""
    pieces = [*SPECIAL, *BYTES, "▁", *CHARACTERS, *STARTS, *MERGED]
    if kind == "Unigram":
        model = models.Unigram([(p, -2.0 if len(p) == 1 else -1.0) for p in pieces], 0, byte_fallback=True)
    else:
        merges = [tuple(pair) for pair in (*STARTS, *MERGED)]
        vocab = {piece: i for i, piece in enumerate(pieces)}
        model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    if scheme == "legacy":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind == "Unigram")
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def policy_with(causal, backend: Tokenizer) -> Policy:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    return Policy(causal("Llama", vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture(params=KINDS, ids=" ".join)
def policy(request, causal) -> Policy:
    return policy_with(causal, sentencepiece(*request.param))


def chosen(policy: Policy, sample: Sample) -> list[str]:
    encoded = policy.encode(sample)
    return policy.tokenizer.convert_ids_to_tokens(encoded.tokens[encoded.action].tolist())


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("2+2=", "4", ["4"]),
        ("2+2=", " 4", ["▁4"]),
        ("2+2=", "=4", ["=", "4"]),  # "==" is one token, but the prompt ends with "="
        ("2+2= ", "4", ["4"]),
        ("2+2=\n", "4", ["4"]),
        ("a", "b", ["b"]),
        ("2+2=", "4 4", ["4", "▁4"]),
        ("2+2=", "\n4", ["<0x0A>", "4"]),
        ("", "4", ["▁4"]),  # the start of a text
    ],
)
def test_a_response_has_the_tokens_of_a_continuation(policy, prompt, response, expected):
    sample = Sample(prompt, response)
    assert chosen(policy, sample) == [*expected, "</s>"]
    assert policy.decode(policy.encode(sample).tokens) == prompt + response


def test_later_turns_are_continuations_too(policy):
    turns = [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5"},
        {"role": "assistant", "content": "6"},
    ]
    sample = Sample([{"role": "user", "content": "3"}], "4", meta={"continuation": turns})
    assert chosen(policy, sample) == ["4", "</s>", "6", "</s>"]


@pytest.mark.parametrize("piece", ["4", "▁4"])
def test_the_text_of_a_sampled_response_tells_its_first_space(policy, piece, monkeypatch):
    """So another run that reads the text trains on the same tokens."""
    tokens = policy.tokenizer.convert_tokens_to_ids([piece, "a", "=", "</s>"])
    script = iter(tokens)
    rollout = Rollout(policy.encoder, HF(policy))
    monkeypatch.setattr(decoding_rows, "draw", lambda *args: (torch.tensor([next(script)]), torch.zeros(1)))
    (s,) = rollout.sample([Prompt("2+2=")], 1, SamplerConfig(max_new=8))
    assert s.response == piece.replace("▁", " ") + "a="
    assert policy.encode(Sample(s.prompt, s.response)).tokens.tolist() == s.tokens.tolist()


def test_a_stop_text_may_begin_with_the_space_of_a_response(policy, monkeypatch):
    script = iter(policy.tokenizer.convert_tokens_to_ids(["▁4", "a", "</s>"]))
    rollout = Rollout(policy.encoder, HF(policy))
    monkeypatch.setattr(decoding_rows, "draw", lambda *args: (torch.tensor([next(script)]), torch.zeros(1)))
    (s,) = rollout.sample([Prompt("2+2=")], 1, SamplerConfig(max_new=8, stop=(" 4",)))
    assert (s.response, int(s.action.sum()), s.meta["finish"]) == ("", 1, "stop")


def test_a_prefix_space_of_byte_level_tokens(causal):
    """GPT-2's tokenizers with add_prefix_space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *alphabet, "Ġ4"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "4")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    policy = policy_with(causal, backend)
    assert chosen(policy, Sample("2+2=", "4")) == ["4", "</s>"]
    assert chosen(policy, Sample("2+2=", " 4")) == ["Ġ4", "</s>"]


def test_a_response_that_cannot_follow_without_a_space_is_counted(causal):
    """Words of a vocabulary are joined by spaces: no tokens spell "2+2=4"."""
    words = models.WordLevel({w: i for i, w in enumerate([*SPECIAL, "2+2=", "4", "=", "."])}, "<unk>")
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    policy = policy_with(causal, backend)
    assert chosen(policy, Sample("2+2=", " 4")) == ["4", "</s>"]
    sample = Sample("2+2=", "4")
    with pytest.raises(InvalidSample, match=sample.prompt_id) as caught:
        policy.encode(sample)
    assert caught.value.reason == "needs a space before it"


def test_observations_are_continuations_too(policy):
    known = policy.tokenizer
    transcript = Transcript(policy.encoder, Prompt("2+2="), policy.encode_prompt("2+2="))
    for observation, expected in (("+1=", ["+", "1", "="]), (" 0", ["▁0"])):
        transcript.act(known.convert_tokens_to_ids(["4"]), None, 0)
        before = len(transcript.rows[0].tokens)
        assert transcript.observe(observation, "user")
        assert known.convert_ids_to_tokens(transcript.rows[0].tokens[before:]) == expected
