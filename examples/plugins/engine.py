"""Your own engine: transformers' `generate`, one prompt at a time, on weights that the run publishes.

    agro train fresh engine.kind=examples/plugins/engine.py:Generate …

It reports each token's log-prob under the distribution that it sampled from, and the version of its weights.
A run compares the first samples with the trainer, so a wrong log-prob shows before training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.models.encoding import Encoder
from agro.rollout.engines import Continuation, Request


class Generate:
    can: ClassVar[frozenset[str]] = (
        frozenset()
    )  # nothing beyond decoding: settings that need more are refused

    def __init__(self, encoder: Encoder, say: Callable[[str], None], dtype: str = "float32") -> None:
        self.ends, self.dtype = list(encoder.eos_ids), getattr(torch, dtype)
        self.model: Any = None
        self.version = -1
        self.measured: Mapping[str, Any] = {}
        self.check: Callable[[], None] = lambda: None

    def load(self, weights: Path, version: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(weights, dtype=self.dtype).eval()
        self.model.generation_config = GenerationConfig()  # a model's own may truncate or penalize
        self.version = version

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        if sampler.truncation or sampler.stop:
            raise Refused("engine Generate: it samples from all tokens, without sampler.stop; remove them")
        while waiting:
            self.check()
            request = waiting.popleft()
            torch.manual_seed(hash((seed, request.number, request.position)) % 2**63)
            made = self.model.generate(
                torch.tensor([request.ids]),
                do_sample=sampler.temperature > 0,
                temperature=sampler.temperature or None,
                top_k=0,
                max_new_tokens=request.room,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
                return_dict_in_generate=True,
                output_logits=True,
            )
            tokens = made.sequences[0, len(request.ids) :]
            logp = (torch.cat(made.logits).float() / (sampler.temperature or 1.0)).log_softmax(-1)
            chosen = logp.gather(1, tokens[:, None])[:, 0].double().numpy()
            yield Continuation(request, tokens.numpy().astype(np.int64), chosen, self.version)

    def close(self) -> None:
        self.model = None
