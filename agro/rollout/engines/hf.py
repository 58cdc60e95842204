"""The embedded engine: a decoding loop on a transformers model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.models.packing import kinds_of_cache
from agro.models.policy import Policy
from agro.models.pretrained import decoder_layers, probed_lengths, refusing_errors
from agro.rollout.engines import ENGINES, Capability, Continuation, Request
from agro.rollout.engines.decoding_rows import Decoder, Rows
from agro.rollout.engines.fused import is_fusable

PROBED = 4  # tokens decoded per sequence when an engine is made


class HF:
    """Decodes with a `Policy` in this process: the learner's own module, or a copy with published weights.

    The weights must not change while an iterator of `decode` is read.
    """

    can: ClassVar[frozenset[Capability]] = ENGINES["hf"]
    mode: ClassVar[str] = "token by token"  # how it decodes, for messages

    def __init__(self, policy: Policy, version: int = -1, *, fused: bool = True) -> None:
        """Raises `Refused` for an architecture whose decoded log-probs differ from the trained ones.

        Args:
            fused: decode with `agro.rollout.engines.fused` if the model has such layers and the results
                agree.
        """
        self.policy = policy
        self.version = version
        self.measured: Mapping[str, Any] = {"requests_failed": 0}
        self.check: Callable[[], None] = lambda: None
        self._may_skip = False  # whether skipping layers was checked
        supported = {DynamicLayer, DynamicSlidingWindowLayer}
        foreign = sorted(kind.__name__ for kind in kinds_of_cache(policy.model) - supported)
        if foreign:
            raise Refused(
                f"{policy.name}: expected a model whose only cache is the keys and values of each layer, got "
                f"{', '.join(foreign)}; sample from it elsewhere and import the responses"
            )
        self.fused = False
        self._probed = SamplerConfig(temperature=policy.temperature, max_new=PROBED)
        with refusing_errors(policy.name, "sampling"):
            self.probe(self._probed)
        if fused and is_fusable(policy):
            self.fused = True
            with refusing_errors(policy.name, "sampling with engine.fused"):
                gap, allowed = self._gap(self._probed)
                self.fused = gap <= allowed

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        """See `agro.rollout.engines.Engine`.

        A greedy choice has log-prob 0: its distribution is a point mass.
        """
        if not waiting:
            return
        version = self.version
        layers: tuple[int, ...] = ()
        if sampler.skip_layers:
            if not self._may_skip:
                self._may_skip = True
                with refusing_errors(self.policy.name, "sampling with skipped layers"):
                    self.probe(self._probed.model_copy(update={"skip_layers": sampler.skip_layers}))
            layers = chosen_layers(self.policy, sampler.skip_layers, seed, waiting[0].number)
        sampling = {"skipped_layers": list(layers)} if layers else {}
        fused = self.fused and not layers and is_fusable(self.policy)
        rows = self.rows(waiting, sampler, seed, fused=fused)
        while waiting or rows.live:
            self.check()
            # Only here, not while the caller runs.
            with skipping(self.policy, layers) if layers else nullcontext():
                if waiting and rows.free >= max(1, rows.size // 4):
                    rows.admit([waiting.popleft() for _ in range(min(rows.free, len(waiting)))])
                finished = rows.step()
            for done in finished:
                if self.version != version:
                    raise RuntimeError(
                        f"version {self.version} arrived while version {version} was sampled from"
                    )
                yield Continuation(done.request, done.tokens, done.logp, version, sampling, done.kept)

    def rows(self, waiting: deque[Request], sampler: SamplerConfig, seed: int, *, fused: bool) -> Decoder:
        """The decoder of these requests, and of later ones with no more room than they have."""
        return Rows(self.policy, waiting, sampler, seed, fused=fused)

    def load(self, weights: Path, version: int) -> None:
        self.policy.load_weights(weights)
        self.version = version

    def close(self) -> None:
        """Nothing to release: the model belongs to the caller."""

    def _gap(self, sampler: SamplerConfig) -> tuple[float, float]:
        """The gap in nats between decoded tokens' log-probs and the trainer's, and that of rounding alone."""
        policy = self.policy
        prompts = policy.probed_rows((1, *probed_lengths(policy.model, policy.context - PROBED)))
        waiting = deque(Request(number, ids.tolist(), PROBED) for number, ids in enumerate(prompts))
        decoded = list(self.decode(waiting, sampler, seed=0))
        sampled = torch.cat([torch.tensor(done.logp) for done in decoded])
        trained = partial(self._trained, decoded)
        return policy.gap(sampled, trained(), trained)

    @torch.no_grad()
    def _trained(self, decoded: Sequence[Continuation]) -> Tensor:
        """Log-probs of decoded tokens as the trainer computes them."""
        policy, logps = self.policy, []
        for done in decoded:
            tokens = torch.tensor([[*done.request.ids, *done.tokens.tolist()]])
            mask = torch.arange(tokens.shape[1])[None] >= len(done.request.ids)
            layers = done.sampling.get("skipped_layers")
            with skipping(policy, layers) if layers else nullcontext():
                logp = policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"]
            logps.append(logp[mask.to(logp.device)].cpu())
        return torch.cat(logps)

    def probe(self, sampler: SamplerConfig) -> None:
        """Raise `Refused` if decoded log-probs differ by more than rounding."""
        gap, allowed = self._gap(sampler)
        if not gap <= allowed:
            raise Refused(
                f"{self.policy.name}: decoded {self.mode}, its log-probs differ by {gap:.3g} nats from "
                f"those of complete sequences (expected at most {allowed:.2g}); sample from it "
                "elsewhere and import the responses"
            )


def chosen_layers(policy: Policy, share: float, seed: int, number: int) -> tuple[int, ...]:
    """The numbers of the layers to skip: a random `share` of those between the first and the last.

    `seed` and `number`, that of the batch's first response, determine them. Raises `Refused` if the share is
    less than half a layer.
    """
    if share == 0:
        return ()
    middle = len(decoder_layers(policy.model)) - 2
    count = round(share * middle)
    if count < 1:
        raise Refused(
            f"sampler.skip_layers: {share:g} of the {max(middle, 0)} layers of {policy.name} between the "
            "first and the last is none; raise it, or remove it"
        )
    random = np.random.default_rng([seed % 2**64, number])
    return tuple(sorted(int(i) + 1 for i in random.choice(middle, count, replace=False)))


@contextmanager
def skipping(policy: Policy, layers: Sequence[int]) -> Iterator[None]:
    """Let these layers return their input (Nested-ReFT, arXiv 2508.10123). They then cache nothing."""
    blocks = decoder_layers(policy.model) if layers else ()
    skipped = [vars(blocks[i]) for i in layers]
    previous = [block.get("forward") for block in skipped]
    try:
        for block in skipped:
            block["forward"] = lambda hidden_states, *args, **kwargs: hidden_states
        yield
    finally:
        for block, method in zip(skipped, previous):
            block.pop("forward", None)
            if method is not None:
                block["forward"] = method
