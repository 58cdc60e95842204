"""A policy: a causal language model, its tokenizer, and the temperature of its log-probs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agro import config as configuration
from agro.adapters import adapted, merged
from agro.chat import Chat
from agro.encoding import Encoder, InvalidSample
from agro.errors import Refused
from agro.generation import end_tokens
from agro.logprobs import Head, Outputs, token_streams
from agro.newmodel import new_model
from agro.objectives.core import VALUES
from agro.pretrained import device_of, pretrained, saved_weights, without_bars
from agro.types import Sample, Text
from agro.value import ValueHead

__all__ = ["InvalidSample", "Policy", "new_model"]

_PROBE_TOKENS = 16


class Policy:
    """A causal language model with its tokenizer.

    The model stays in train mode, with every dropout probability 0, so that training and sampling have the
    same log-probs. All log-probs are in nats, at `temperature`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        chunk: int = 128,
        adapter: Any = None,
        chat: configuration.Chat | None = None,
    ) -> None:
        """Raises `Refused` for a model whose log-probs agro can't compute exactly.

        Args:
            chunk: positions whose logits exist at once.
            adapter: the peft model around `model`, where only the adapter is trained.
        """
        self.model = model
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.chunk = chunk
        self.name = type(model).__name__
        self.vocab_size: int = Head.of(model).weight.shape[0]
        self.context = _context(model.config.get_text_config())
        self.chat = Chat.of(tokenizer, chat or configuration.Chat())
        self.eos_ids = end_tokens(model, self.chat)
        if len(tokenizer) > self.vocab_size:
            raise Refused(
                f"{self.name}: the tokenizer has {len(tokenizer)} tokens, the model's output layer "
                f"{self.vocab_size}; use the tokenizer that was saved with the model, or resize the model's "
                "embeddings and train them first"
            )
        self.recompute = False  # gradient checkpointing
        self.value: ValueHead | None = None
        self.fingerprint = self.chat.fingerprint
        self.encoder = Encoder(self.chat, self.eos_ids, self.vocab_size, self.context, self.name)
        _without_dropout(model)
        model.train()
        self._probe()

    @classmethod
    def load(cls, config: configuration.Policy, *, seed: int = 0) -> Policy:
        """The model of the configuration, by folder or hub name, or a new one.

        `seed` is for random weights, of an adapter too. Only safetensors are loaded. Sets the number of CPU
        threads of the process where the configuration has one: torch uses all cores by default, and on models
        of a few million parameters the threads wait for each other.
        """
        if (config.model is None) == (config.new is None):
            got = "neither" if config.model is None else "both"
            raise Refused(
                "policy: expected either policy.model (a folder or hub name) or [policy.new] (random "
                f"weights), got {got}"
            )
        if config.threads:
            torch.set_num_threads(config.threads)
        where = device_of(config.device)
        with tempfile.TemporaryDirectory() as folder, without_bars():
            if config.new is not None:
                new_model(folder, config.new, seed)
            model, tokenizer = pretrained(config.model or folder, config)
        model.to(where)
        adapter = None
        if config.lora is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                adapter = adapted(model, config.model or "", config.lora)
        return cls(
            model,
            tokenizer,
            temperature=config.temperature,
            chunk=config.chunk,
            adapter=adapter,
            chat=config.chat,
        )

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    def weights(self) -> dict[str, Tensor]:
        """The parameters that training changes: the adapter's, or all."""
        return {n: p for n, p in self.model.named_parameters() if self.adapter is None or p.requires_grad}

    def add_value(self) -> None:
        """Add a value head, which is trained beside the policy; see `ValueHead`."""
        width = Head.of(self.model).weight.shape[1]
        self.value = ValueHead(width).to(self.device, torch.promote_types(self.dtype, torch.float32))

    def value_weights(self) -> dict[str, Tensor]:
        """The parameters of the value head, where there is one; `weights` doesn't include them."""
        if self.value is None:
            return {}
        return dict(self.value.named_parameters())

    def zero_grad(self) -> None:
        """Delete all gradients, of the model and of the value head."""
        for module in (self.model, self.value):
            if module is not None:
                module.zero_grad(set_to_none=True)

    @property
    def dtype(self) -> torch.dtype:
        return Head.of(self.model).weight.dtype

    def encode_prompt(self, text: Text) -> list[int]:
        """Ids of a prompt; see `Encoder.prompt`."""
        return self.encoder.prompt(text)

    def encode(self, sample: Sample, max_length: int | None = None) -> Sample:
        """The sample with `tokens`, `action` and `tokenizer` of this policy; see `Encoder.encode`."""
        return self.encoder.encode(sample, max_length)

    def encode_text(self, text: str) -> list[int]:
        """Ids of the text alone, without special tokens before or after it."""
        return self.encoder.ids(text)

    def render(self, text: Text) -> str:
        """The text of a prompt that is encoded; see `Encoder.render`."""
        return self.encoder.render(text)

    def decode(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Text without special tokens; see `Encoder.decode`."""
        return self.encoder.decode(ids, after)

    def hidden(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B,T], [B] -> [B,T,H] last hidden states of right-padded sequences; padding is ignored.

        Causal attention doesn't use later tokens, so padding needs no mask, and attention without a mask has
        the fastest kernel. (A mask of ones, not None: None makes transformers look for packed sequences.)
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        ids = torch.where(places < lengths[:, None], tokens, 0).long()
        with self._recomputing(self.recompute and torch.is_grad_enabled()):
            return self.model.base_model(  # type: ignore[no-any-return]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=places[None].expand(ids.shape),
                use_cache=False,
            ).last_hidden_state

    @contextmanager
    def _recomputing(self, active: bool) -> Iterator[None]:
        """Gradient checkpointing, switched off again at the end: it excludes the cache of a sampler."""
        if not active:
            yield
            return
        kind = "gradient"
        if hasattr(self.model, "activation_checkpointing_enable"):  # its newer name
            kind = "activation"
        getattr(self.model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
        try:
            yield
        finally:
            getattr(self.model, f"{kind}_checkpointing_disable")()

    def streams(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        want: Collection[str] = ("logp",),
        reference: Policy | None = None,
    ) -> dict[str, Tensor]:
        """The streams named by `want`: per token, in nats, or of the value head.

        Args:
            tokens: [B,T], padded on the right with any value.
            lengths: [B] tokens of each sequence.
            mask: [B,T] positions to compute, within the lengths, without the first token.
            want: of "logp", "entropy", "kl" (exact, of π from `reference`), "prefix_value" and "value".
        Returns:
            name -> [B,T] float32 (float64 for float64 weights), NaN outside the mask, differentiable in the
            weights; "value" is [B].
        """
        tokens, lengths, mask = (t.to(self.device) for t in (tokens, lengths, mask))
        other: Outputs | None = None
        if "kl" in want and reference is not None:
            with torch.no_grad():
                other = Outputs(reference.hidden(tokens, lengths), Head.of(reference.model))
        hidden = self.hidden(tokens, lengths)
        out = token_streams(
            Outputs(hidden, Head.of(self.model)),
            tokens,
            mask,
            want=set(want) - VALUES,
            temperature=self.temperature,
            chunk=self.chunk,
            reference=other,
        )
        if VALUES & set(want):
            assert self.value is not None
            out |= {s: v for s, v in self.value.streams(hidden, mask).items() if s in want}
        return out

    def save(self, folder: str | Path, *, merge: bool = True) -> None:
        """Write model (safetensors) and tokenizer in transformers format; an adapter merged, or by itself."""
        model = self.model
        if self.adapter is not None:
            model = merged(self.adapter) if merge else self.adapter
        with without_bars():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        """Copy the weights of a model that was saved in `folder` into this one.

        Raises `Refused`, and changes nothing, unless names and shapes are the same.
        """
        assert self.adapter is None, "an adapter is published merged into its model"
        saved = saved_weights(folder, self.model)
        for name, own in self.model.state_dict().items():
            own.copy_(saved[name])

    @torch.no_grad()
    def _probe(self) -> None:
        """Raise `Refused` unless chunked log-probs equal those of the model's own logits on random tokens."""
        length = min(_PROBE_TOKENS, self.context)
        random_ids = np.random.default_rng(0).integers(0, self.vocab_size, (1, length))
        ids = torch.from_numpy(random_ids).to(self.device)
        mask = torch.arange(length, device=self.device)[None] > 0
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = torch.log_softmax(wide / self.temperature, -1)
        own = own.gather(2, ids[:, 1:, None])[..., 0]
        ours = self.streams(ids, torch.tensor([length]), mask)["logp"][:, 1:]
        difference = (ours - own).abs().max().item()
        # The same products in other shapes are rounded differently, by a few units in the last place of the
        # largest logit.
        allowed = 1e-5 + 8 * torch.finfo(self.dtype).eps * logits.abs().max().item() / self.temperature
        if not difference <= allowed:
            raise Refused(
                f"{self.name}: log-probs computed in chunks differ from those of the model's own logits by "
                f"{difference:.3g} nats (expected at most {allowed:.2g}): the model changes its logits in a "
                "way that agro doesn't support, or part of it is random in training; use another model"
            )


def _context(config: Any) -> int:
    """The model's context length in tokens; `sys.maxsize` where it has no limit."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    return sys.maxsize


def _without_dropout(model: torch.nn.Module) -> None:
    """Set every probability of dropout, of dropped layers and of router jitter to 0."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
