"""One model's keys and values of several sequences of different lengths.

The token at position p of a sequence is in column p, so what a rejected proposal wrote is overwritten by the
token that takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from agro.errors import Refused
from agro.models.head import Head
from agro.models.policy import Policy
from agro.rollout.engines.decoding_rows import ColumnsLayer


class _LaneLayer(ColumnsLayer):
    """Several tokens of each row in a pass, each in the column of its position."""

    rows: Lane

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, at_bq, end = self.rows.rows, self.rows.at_bq, self.rows.end
        index = torch.arange(rows.start, rows.stop, device=at_bq.device)[:, None]
        self.keys[index, :, at_bq] = key_states.transpose(1, 2)
        self.values[index, :, at_bq] = value_states.transpose(1, 2)
        return self.keys[rows, :, :end], self.values[rows, :, :end]

    def get_seq_length(self) -> int:
        return self.rows.end - self.rows.at_bq.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.end, 0


class Lane:
    """Reads several tokens of each of `size` sequences in one pass."""

    def __init__(self, policy: Policy, size: int, columns: int) -> None:
        """Raises `Refused` for a model with layers that don't attend to the complete sequence."""
        self.policy, self.size, self.columns = policy, size, columns
        config = policy.model.config
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        foreign = sorted(kind.__name__ for kind in kinds - {DynamicLayer})
        if foreign:
            raise Refused(
                f"sampler.draft: expected models whose layers attend to all earlier tokens, but "
                f"{policy.name} has {', '.join(foreign)}; leave sampler.draft out"
            )
        self.rows = slice(0, 0)
        self.at_bq = torch.zeros((0, 1), dtype=torch.long, device=policy.device)
        self.end = 1
        count = config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[_LaneLayer(self) for _ in range(count)])
        self.head = Head.of(policy.model)

    def hidden(self, tokens_bq: Tensor, at_bq: Tensor, end: int, first: int = 0) -> Tensor:
        """[b,q] tokens at positions `at_bq` of the sequences first, first + 1, … -> [b,q,H] hidden states.

        `end`: one more than the largest of these positions.
        """
        b, q = tokens_bq.shape
        self.rows, self.at_bq, self.end = slice(first, first + b), at_bq, end
        seen = torch.arange(self.end, device=at_bq.device) <= at_bq[:, :, None]
        dtype = self.policy.dtype
        mask = torch.zeros((b, 1, q, self.end), dtype=dtype, device=at_bq.device)
        mask.masked_fill_(~seen[:, None], torch.finfo(dtype).min)
        return self.policy.model.base_model(  # type: ignore[no-any-return]
            input_ids=tokens_bq,
            attention_mask=mask,
            # Beyond the context are only proposals that the end of the response cuts off.
            position_ids=at_bq.clamp(max=self.policy.context - 1),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Let the sequences `to` have the keys and values of the sequences `source`."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys[to] = layer.keys[source]
                layer.values[to] = layer.values[source]

    def widen(self, columns: int) -> None:
        """Add columns at the end."""
        self.columns += columns
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (pad(x, (0, 0, 0, columns)) for x in (layer.keys, layer.values))
