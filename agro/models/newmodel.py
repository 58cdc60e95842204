"""A small Llama with random weights and one token per character, or per byte, in transformers format."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from agro.config import NewModel
from agro.errors import Refused
from agro.io.files import writing
from agro.models.pretrained import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")


def new_model(folder: str | Path, spec: NewModel, seed: int) -> None:
    """Write model and tokenizer into `folder`; the same bytes for the same `spec` and `seed`.

    The vocabulary is <pad>, <bos>, <eos>, <unk>, then the characters. <bos> precedes a text. Decoding is
    exact, even for the name of a special token.
    """
    if spec.hidden % spec.heads or spec.hidden // spec.heads % 2:
        raise Refused(
            "policy.new: expected heads that divide hidden into parts of an even size, "
            f"got hidden = {spec.hidden}, heads = {spec.heads}"
        )
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(spec)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden,
        intermediate_size=-(-8 * spec.hidden // 3 // 8) * 8,  # Llama's 8/3, rounded up to a multiple of 8
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.context,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig.from_model_config(config)
    with writing(Path(folder)), without_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _tokenizer(spec: NewModel) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    as_bytes = spec.alphabet == "bytes"
    characters = sorted(pre_tokenizers.ByteLevel.alphabet()) if as_bytes else list(spec.alphabet)
    if len(set(characters)) < len(characters) or not characters:
        repeated = sorted({c for c in characters if characters.count(c) > 1})
        raise Refused(
            f"policy.new.alphabet: expected different characters, or 'bytes'; repeated: {''.join(repeated)!r}"
        )
    vocabulary = {piece: i for i, piece in enumerate(itertools.chain(SPECIALS, characters))}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token=UNK)  # without merges: one token per character
    tokenizer = Tokenizer(model)
    if as_bytes:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel() if as_bytes else decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=spec.context,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
