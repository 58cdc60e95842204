"""A policy: a causal language model, its tokenizer, the temperature of its log-probs, and a value head."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from agro import config as configuration
from agro.errors import Refused
from agro.models import pretrained as architecture
from agro.models.adapters import adapted, merged
from agro.models.chat import Chat, end_tokens
from agro.models.encoding import Encoder, InvalidSample
from agro.models.logprobs import OF_REFERENCE, Head, Outputs, token_streams
from agro.models.packing import can_pack, last_hidden
from agro.models.pretrained import device_of, new_model, pretrained, saved_weights, set_threads, without_bars
from agro.types import KeptSets, Sample

__all__ = ["InvalidSample", "Policy", "new_model"]

VALUES = frozenset({"prefix_value", "value"})  # a value head's streams


class ValueHead(nn.Module):
    """V(y_<t) in units of reward, linear in the direction of the last hidden state.

    Hidden states are scaled to length 1, so that a learning rate has the same effect at every width: a step
    of Adam moves V by at most lr · √H. V starts at 0. Hidden states are detached: the value's loss doesn't
    train the policy.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…,H] -> […]"""
        states = hidden.detach().to(self.linear.weight.dtype)
        values: Tensor = self.linear(nn.functional.normalize(states, dim=-1))[..., 0]
        return values

    def streams(self, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The streams "prefix_value" [B,T] and "value" [B].

        "prefix_value" is V of the prefix before each token, NaN outside the mask. "value" is V before the
        first token in the mask.
        """
        values = torch.full(mask.shape, torch.nan, dtype=self.linear.weight.dtype, device=mask.device)
        values[:, 1:] = self(hidden[:, :-1])
        start = mask.int().argmax(1, keepdim=True)
        return {"prefix_value": torch.where(mask, values, torch.nan), "value": values.gather(1, start)[:, 0]}


class Masters:
    """Float32 copies of bfloat16 weights, which the optimizer updates (`policy.dtype = "mixed"`).

    An update smaller than a 256th of a weight rounds away in bfloat16, and so does a small gradient in a sum
    over passes. So weights and sums of gradients are float32, and products use the rounded weights.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        """`live`: float32 parameters by name. They become bfloat16."""
        self.live = live
        self.weights: dict[str, Tensor] = {}
        self.hooks = []
        for name, p in live.items():
            self.weights[name] = p.detach().clone().requires_grad_()
            p.data = p.data.bfloat16()
            self.hooks.append(p.register_post_accumulate_grad_hook(partial(self._take_gradient, name)))

    def _take_gradient(self, name: str, p: Tensor) -> None:
        """Add the gradient of one backward pass to the float32 weight's, and free it."""
        assert p.grad is not None
        master = self.weights[name]
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
        p.grad = None

    def zero_grad(self) -> None:
        for master in self.weights.values():
            master.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Set the model's weights to the rounded float32 weights."""
        for name, p in self.live.items():
            p.copy_(self.weights[name])

    def give_back(self) -> None:
        """Make the model's weights float32 again, for FSDP, which rounds the weights that it gathers."""
        for hook in self.hooks:
            hook.remove()
        for name, p in self.live.items():
            p.data = self.weights[name].detach()


@contextmanager
def recomputing(model: Any, active: bool) -> Iterator[None]:
    """Enable gradient checkpointing within the context; outside, it would rule out a sampler's cache."""
    if not active:
        yield
        return
    newer = hasattr(model, "activation_checkpointing_enable")
    kind = "activation" if newer else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(model, f"{kind}_checkpointing_disable")()


class Policy:
    """A causal language model with its tokenizer.

    Nothing in the model is random, so training and sampling have the same log-probs, those of eval mode. All
    log-probs are in nats, at `temperature`.
    """

    served: str | None = None  # the model's name on a server that computes the log-probs instead

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        chunk: int = 512,
        adapter: Any = None,
        chat: configuration.ChatConfig | None = None,
    ) -> None:
        """Raises `Refused` for a model whose log-probs agro can't compute exactly.

        Args:
            chunk: number of positions whose logits exist at once, for 1,024 vocabulary entries at a time.
            adapter: the peft model around `model`, if only the adapter is trained.
        """
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # else a sampled padding token would have no gradient
                module.padding_idx = None
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.chunk = chunk
        self.name = type(model).__name__
        self.vocab_size: int = Head.of(model).weight.shape[0]
        self.context = architecture.context_of(model)
        self.chat = Chat.of(tokenizer, chat or configuration.ChatConfig())
        self.eos_ids = end_tokens(model, self.chat)
        if len(tokenizer) > self.vocab_size:
            raise Refused(
                f"{self.name}: the tokenizer has {len(tokenizer)} tokens, but the model's output layer has "
                f"{self.vocab_size}; use the tokenizer that was saved with the model, or resize the model's "
                "embeddings and train them first"
            )
        self.recompute = False  # gradient checkpointing
        self.packs = False  # whether passes compute common prefixes once, without padding
        self.value: ValueHead | None = None
        self.masters: Masters | None = None
        self.fingerprint = self.chat.fingerprint
        self.encoder = Encoder(self.chat, self.eos_ids, self.vocab_size, self.context, self.name)
        with architecture.refusing_errors(self.name, "a first forward pass"):
            self._probe()

    @classmethod
    def load(cls, config: configuration.PolicyConfig, *, seed: int = 0) -> Policy:
        """Load the configuration's model by folder or hub name, or create a new one.

        `seed`: for random weights, also an adapter's. Only safetensors are loaded. Sets the process's number
        of CPU threads if the configuration has one: torch uses all cores by default, and on models of a few
        million parameters the threads wait for each other.
        """
        config.check_weights()
        device = device_of(config.device)
        with tempfile.TemporaryDirectory() as folder, without_bars():
            if config.new is not None:
                new_model(folder, config.new, seed)
            model, tokenizer = pretrained(config.model or folder, config)
        if config.quantize is None:  # quantized weights are there already
            model.to(device)
        adapter = None
        if config.lora is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                adapter = adapted(model, config.model or "", config.lora)
        masters = None
        if config.dtype == "mixed" and adapter is None:
            masters = Masters(dict(model.named_parameters()))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the probe has few tokens, and more threads would spin on a busy machine
        try:
            policy = cls(
                model,
                tokenizer,
                temperature=config.temperature,
                chunk=config.chunk,
                adapter=adapter,
                chat=config.chat,
            )
        finally:
            set_threads(config.threads or threads, model)
        policy.masters = masters
        return policy

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    def weights(self) -> dict[str, Tensor]:
        """The parameters that training changes: the adapter's, or all."""
        return {n: p for n, p in self.model.named_parameters() if self.adapter is None or p.requires_grad}

    def trained(self) -> dict[str, Tensor]:
        """The tensors that the optimizer updates: `weights`, or float32 copies if policy.dtype is mixed."""
        return self.weights() if self.masters is None else self.masters.weights

    def add_value(self) -> None:
        """Add a value head, which is trained alongside the policy; see `ValueHead`."""
        width = Head.of(self.model).weight.shape[1]
        self.value = ValueHead(width).to(self.device, torch.promote_types(self.dtype, torch.float32))

    def value_weights(self) -> dict[str, Tensor]:
        """The parameters of the value head, if there is one; `weights` doesn't include them."""
        if self.value is None:
            return {}
        return dict(self.value.named_parameters())

    def zero_grad(self) -> None:
        """Delete all gradients of the model and the value head."""
        for module in (self.model, self.value):
            if module is not None:
                module.zero_grad(set_to_none=True)
        if self.masters is not None:
            self.masters.zero_grad()

    @property
    def dtype(self) -> torch.dtype:
        return Head.of(self.model).weight.dtype

    def encode(self, sample: Sample, max_length: int | None = None) -> Sample:
        """The sample with `tokens`, `action` and `tokenizer` of this policy; see `Encoder.encode`."""
        return self.encoder.encode(sample, max_length)

    def hidden(self, tokens: Tensor, lengths: Tensor, *, packs: bool = True) -> Tensor:
        """[B,T], [B] on the CPU -> [B,T,H] last hidden states of right-padded sequences; padding is ignored.

        `packs`: whether the layers may compute common prefixes once; otherwise their outputs are [B,T,H].
        Raises `Refused` for more tokens than the context.
        """
        if tokens.shape[1] > self.context:
            problem = f"{tokens.shape[1]} tokens, but the model's context is {self.context}"
            raise Refused(f"{self.name}: {problem}; set train.max_length")
        places = torch.arange(tokens.shape[1])
        ids = torch.where(places < lengths[:, None], tokens, 0).long()
        with recomputing(self.model, self.recompute and torch.is_grad_enabled()):
            return last_hidden(self.model, ids, lengths, packs=packs and self.packs)

    def checkpoint_gradients(self, active: bool) -> None:
        """Set `recompute`. Raises `Refused` if the model can't recompute its activations."""
        if active and not self.model.supports_gradient_checkpointing:
            raise Refused(f"train.gradient_checkpointing: {self.name} doesn't support it; set it to false")
        self.recompute = active

    def streams(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        want: Collection[str] = ("logp",),
        reference: Policy | None = None,
        kept: KeptSets | None = None,
    ) -> dict[str, Tensor]:
        """The streams named by `want`: per token, in nats, or the value head's.

        Tokens, lengths and mask are read on the CPU, so that a pass never waits for a GPU.

        Args:
            tokens: [B,T], padded on the right with any value.
            lengths: [B] tokens of each sequence.
            mask: [B,T] positions to compute, within the lengths, without the first token.
            want: of "logp", "entropy", "kl" (exact, of π from `reference`), "proposal", "proposal_mean" (at a
                need's own temperature), "ref_mean", "ref_square", "normalizer", "prefix_value" and
                "value".
            kept: the kept sets that log-probs are normalized over; None: the vocabulary.
        Returns:
            name -> [B,T] float32 (float64 for float64 weights), NaN outside the mask, differentiable in the
            weights; "value" is [B].
        """
        tokens, lengths, mask = (t.cpu() for t in (tokens, lengths, mask))
        other: Outputs | None = None
        if OF_REFERENCE & set(want) and reference is not None:
            with torch.no_grad():
                other = Outputs(reference.hidden(tokens, lengths), Head.of(reference.model))
        hidden = self.hidden(tokens, lengths)
        streams = token_streams(
            Outputs(hidden, Head.of(self.model), kept),
            tokens,
            mask,
            want=set(want) - VALUES,
            temperature=self.temperature,
            chunk=self.chunk,
            reference=other,
        )
        if VALUES & set(want):
            assert self.value is not None
            mask = mask.to(self.device, non_blocking=True)
            streams |= {s: v for s, v in self.value.streams(hidden, mask).items() if s in want}
        return streams

    def save(self, folder: str | Path, *, merge: bool = True) -> None:
        """Write model (safetensors) and tokenizer in transformers format; an adapter is merged, or alone."""
        model = self.model
        if self.adapter is not None:
            model = merged(self.adapter) if merge else self.adapter
        with without_bars():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def save_base(self, folder: Path) -> None:
        """Write the model without its adapter. Quantized weights keep their packed bits, so a server that
        loads the folder has the trainer's numbers."""
        from huggingface_hub import save_torch_state_dict

        state = self.model.state_dict().items()
        base = {name.replace(".base_layer.", "."): w for name, w in state if ".lora_" not in name}
        for part in (self.model.config, self.model.generation_config, self.tokenizer):
            part.save_pretrained(folder)
        # The model's own save_pretrained would ask bitsandbytes for the adapter's names too.
        tied = list(self.model._tied_weights_keys or ())
        save_torch_state_dict(base, folder, metadata={"format": "pt"}, shared_tensors_to_discard=tied)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        """Copy the weights of a model saved in `folder` into this one.

        Raises `Refused`, and changes nothing, unless names and shapes are the same.
        """
        assert self.adapter is None, "an adapter is published merged into its model"
        saved = saved_weights(folder, self.model)
        for name, weight in self.model.state_dict().items():
            weight.copy_(saved[name])

    def gap(self, actual: Tensor, expected: Tensor, logp: Callable[[], Tensor]) -> tuple[float, float]:
        """The gap between log-probs and `expected`, which `logp()` computes, and the gap due to rounding.

        In nats. In float32 it is the largest difference; correct passes of other shapes differ by far less
        than .001. In 16 bits it is the mean, and the rounding of this model is measured.
        """
        difference = (actual - expected).abs()
        if torch.finfo(self.dtype).bits <= 16:
            return difference.mean().item(), architecture.ALLOWED * architecture.moved_by_rounding(
                self.model, logp, expected
            )
        return difference.max().item(), 1e-3 / min(1.0, self.temperature)

    def probed_rows(self, lengths: Sequence[int]) -> list[Tensor]:
        """Rows of random tokens, which show most; in 16 bits, where rounding hides it, the model's own."""
        if torch.finfo(self.dtype).bits <= 16:
            return architecture.written_rows(self.model, lengths, self.temperature)
        random = np.random.default_rng(0)
        return [torch.from_numpy(random.integers(0, self.vocab_size, n)) for n in lengths]

    @torch.no_grad()
    def _probe(self) -> None:
        """Raise `Refused` unless rows of tokens, each alone and all in one pass, have the log-probs of the
        unchanged model in eval mode."""
        self.model.eval()
        rows = self.probed_rows(architecture.probed_lengths(self.model, self.context))
        parts, largest = zip(*(architecture.own_logp(self.model, row, self.temperature) for row in rows))
        expected = torch.cat(parts)
        architecture.without_randomness(self.model)
        # Rounding depends on the shape of a product: by a few units in the last place of the largest logit.
        close = 1e-5 + 8 * torch.finfo(self.dtype).eps * max(largest)
        for passes, bound in (([[row] for row in rows], close), ([rows], 1.0)):
            logp = partial(self._passes, passes)
            gap, allowed = self.gap(logp(), expected, logp)
            limit = min(allowed, bound)
            if not gap <= limit:
                raise Refused(
                    f"{self.name}: log-probs differ from those of the model's own logits by {gap:.3g} nats "
                    f"(expected at most {limit:.2g}): the model changes its logits in a way that agro "
                    "doesn't support, is random in training, or mixes a batch's sequences; use another model"
                )
        self.packs = can_pack(self.model, rows[-1], min(allowed, close))

    def _passes(self, passes: Sequence[list[Tensor]]) -> Tensor:
        """Log-probs of rows of tokens without the rows' first tokens; each list of rows is one pass."""
        logp = []
        for rows in passes:
            lengths = torch.tensor([len(row) for row in rows])
            tokens = pad_sequence(rows, batch_first=True)
            places = torch.arange(tokens.shape[1])
            mask = (places > 0) & (places < lengths[:, None])
            logp.append(self.streams(tokens, lengths, mask)["logp"][mask.to(self.device)])
        return torch.cat(logp)
