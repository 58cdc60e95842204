"""The batch that is being decoded.

Tokens, log-probs and noise are on the CPU. The model's device has keys, values and the mask of each row's
attention. A step sends it the noise and copies back tokens and log-probs, so it waits for a GPU once.

All rows write into the same column of preallocated buffers, so shorter rows are padded on the left, and a
step is one forward pass over [b,1] tokens. A finished row is removed at once, and the last row moves into its
place. When a row is added, the keys and values of all its prompt's tokens except the last are computed, and
placed to end at the column before the current one; the next step of all rows processes the last token.
Prompts are padded on the right, as in training, and processed once for all rows that are added together. When
the columns are used up, the live ones move to the left. When a prompt is longer than all earlier ones,
columns are added on the left. `Stops` finds a stop text at the end of a response.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.models.logprobs import Head
from agro.models.packing import NAME as PACKED
from agro.models.packing import kinds_of_cache, read_prompts
from agro.models.policy import Policy
from agro.rollout.engines import Request
from agro.rollout.engines.draw import draw, kept_sets, uniforms
from agro.rollout.engines.fused import FusedStep
from agro.types.kept_sets import Ids


class Stops:
    """The texts that end a response."""

    def __init__(self, policy: Policy, texts: Sequence[str]) -> None:
        self.policy, self.texts = policy, texts
        self._window = max((len(text.encode()) for text in texts), default=0) + 8  # tokens

    def found(self, tokens: NDArray[np.int64], start: int, end: int) -> bool:
        """Whether the last token of `tokens[start:end]` completes a stop text.

        Such a text is new, so only the last tokens are decoded. At least one token precedes `start`.
        """
        special, count = self.policy.encoder.special, self._window
        while True:  # until enough of them have text
            begin = max(start, end - count)
            previous, *ids = tokens[begin - 1 : end].tolist()
            without_text = sum(token in special for token in ids)
            if begin == start or len(ids) - without_text >= self._window:
                break
            count = self._window + without_text
        tail = self.policy.encoder.decode(ids, [previous])
        return any(text in tail for text in self.texts)


HAS_KEYS = attrgetter("is_initialized")  # no layer before the first pass, then all that aren't skipped
_SLACK = 256  # columns beyond what a row may need, so that moving to the left is rare


class Decoder(Protocol):
    """Decodes at most `size` requests at once; those in `live` are unfinished."""

    size: int
    live: list[Request]

    @property
    def free(self) -> int: ...

    def admit(self, wave: list[Request]) -> None:
        """Add requests, at most `free`."""

    def step(self) -> list[Finished]:
        """Decode one or more tokens for every row; remove and return the finished rows."""
        ...


class Finished(NamedTuple):
    request: Request
    tokens: NDArray[np.int64]  # [T] of its response
    logp: NDArray[np.float64]  # [T]
    kept: list[Ids] | None  # [T] see `Continuation.kept`


def close_ranks(live: list[Request], done: Sequence[int]) -> tuple[list[int], list[int]]:
    """Replace the rows `done` of `live` by the last ones. Returns the freed rows, and those that moved."""
    remaining = len(live) - len(done)
    holes = [i for i in done if i < remaining]
    movers = [i for i in range(remaining, len(live)) if i not in set(done)]
    for hole, mover in zip(holes, movers, strict=True):
        live[hole] = live[mover]
    del live[remaining:]
    return holes, movers


class ColumnsLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [size,heads,columns,width]; a forward pass sees the columns in use."""

    def __init__(self, rows: Any) -> None:
        """`rows`: the owner of this layer, with `size` and `columns`."""
        super().__init__()
        self.rows: Any = weakref.proxy(rows)  # a cycle would keep the buffers until garbage collection

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            x.new_zeros((self.rows.size, x.shape[1], self.rows.columns, x.shape[3]))
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def get_max_length(self) -> int:
        return int(self.rows.columns)


class _RowsLayer(ColumnsLayer):
    """One token of each row in a pass, all in the same column."""

    rows: Rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        b, end = len(key_states), self.rows.end
        self.keys[:b, :, end - 1] = key_states[:, :, 0]
        self.values[:b, :, end - 1] = value_states[:, :, 0]
        return self.keys[:b, :, self.rows.low : end], self.values[:b, :, self.rows.low : end]

    def get_seq_length(self) -> int:
        return self.rows.end - 1 - self.rows.low

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class Rows:
    """The `live` requests are rows 0 … b-1 of the buffers; their tokens are in columns low … end-1."""

    def __init__(
        self,
        policy: Policy,
        requests: Collection[Request],
        sampler: SamplerConfig,
        seed: int,
        *,
        fused: bool = False,
    ) -> None:
        """`requests`: those so far, for the sizes. No later one may have more room than these."""
        self.policy = policy
        self.sampler, self.seed = sampler, seed
        self.live: list[Request] = []
        # Kept sets of a request's tokens so far, by its number; None: not recorded.
        self.kept: dict[int, list[Ids]] | None = {} if sampler.records_kept else None
        self.size = min(sampler.batch, len(requests))
        self.longest = max(len(r.ids) for r in requests)  # prompt
        room = max(r.room for r in requests)
        self.columns = self.longest + room
        if len(requests) > self.size:
            self.columns += _SLACK
        self.end = self.longest
        self.low = self.longest
        self.tokens = np.zeros((self.size, self.columns), np.int64)
        self.logp = np.zeros((self.size, self.columns))
        self.noise = np.zeros((self.size, room))
        self.start, self.first, self.limit = np.zeros((3, self.size), np.int64)
        self.number = np.arange(self.size)
        self.eos = np.array(policy.eos_ids, np.int64)
        self.device = policy.device
        # The last token of each row, and the mask added to its attention: -inf in columns before its start.
        self.last = torch.zeros(0, dtype=torch.long, device=self.device)
        self.mask = torch.zeros((self.size, self.columns), dtype=policy.dtype, device=self.device)
        config = policy.model.config.get_text_config()
        self.cache = Cache(layers=[_RowsLayer(self) for _ in range(config.num_hidden_layers)])
        self.attention = config._attn_implementation
        # Whether all layers attend to all columns.
        self.is_global = kinds_of_cache(policy.model) == {DynamicLayer}
        self.head = Head.of(policy.model)
        self.fused = FusedStep(policy, self.size) if fused else None
        self.stops = Stops(policy, sampler.stop)

    @property
    def free(self) -> int:
        return self.size - len(self.live)

    @torch.no_grad()
    def admit(self, wave: list[Request]) -> None:
        longest = max(len(r.ids) for r in wave)
        if longest > self.longest:  # at least doubles the columns for prompts, so it is rare
            more = max(longest - self.longest, self.longest)
            self.longest += more
            self._move(self.end + more, self.columns + more)
        if not self.live:
            self.end = self.longest
        b, e = len(self.live), self.end
        new = slice(b, b + len(wave))
        for row, r in enumerate(wave, b):
            self.tokens[row, e - len(r.ids) : e] = r.ids
        lengths = np.array([len(r.ids) for r in wave])
        self.start[new] = e - lengths
        self.first[new] = e
        self.limit[new] = e + np.array([r.room for r in wave])
        numbers, positions = [r.number for r in wave], [r.position for r in wave]
        self.noise[new] = uniforms(self.seed, numbers, self.noise.shape[1], positions)
        self.last = torch.cat([self.last, self._sent(self.tokens[new, e - 1])])
        self._hide(new)
        self._prefill(wave, b)
        self.live += wave
        self.low = int(self.start[: len(self.live)].min())

    def _sent(self, values: NDArray[Any]) -> Tensor:
        """Copy numbers to the model's device, without waiting for it."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _hide(self, rows: slice) -> None:
        """Let these rows attend only to the columns from their starts on."""
        hidden = np.arange(self.columns) < self.start[rows, None]
        self.mask[rows] = 0
        self.mask[rows].masked_fill_(self._sent(hidden), -torch.inf)

    def _prefill(self, wave: list[Request], b: int) -> None:
        """Put the keys and values of the prompts, except for their last tokens, before the current column."""
        prompts = {id(r.ids): r.ids[:-1] for r in wave if len(r.ids) > 1}
        if not prompts:
            return
        width = max(map(len, prompts.values()))
        ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts.values()])
        lengths = torch.tensor([len(p) for p in prompts.values()])
        read = read_prompts(self.policy.model, ids, lengths, packs=self.policy.packs)
        if not read.cache.layers:
            raise Refused(
                f"{self.policy.name}: expected a model that caches the keys and values of each layer, but it "
                "caches none; sample from it elsewhere and import the responses"
            )
        number = {key: i for i, key in enumerate(prompts)}
        pairs = np.array([(b + i, number[id(r.ids)]) for i, r in enumerate(wave) if len(r.ids) > 1])
        # In a row shorter than `width`, the columns before its start get any finite values: they are masked.
        indices = (np.arange(-width, 0) + lengths.numpy()[pairs[:, 1], None]).clip(min=0)
        (to, source), positions = self._sent(pairs.T), self._sent(indices)
        window = slice(self.end - 1 - width, self.end - 1)
        for mine, theirs in zip(self.cache.layers, read.cache.layers):
            if not theirs.is_initialized:  # a skipped layer
                continue
            if not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)
            mine.keys[to, :, window] = read.at(theirs.keys, source, positions)
            mine.values[to, :, window] = read.at(theirs.values, source, positions)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Decode one more token for every row; remove and return the finished rows."""
        if self.end == self.columns:  # to the left, except for the columns that the longest prompt may need
            self._move(self.end - min(self.low, self.end - self.longest), self.columns)
        b, e = len(self.live), self.end
        noise = self.noise[self.number[:b], e - self.first[:b]]
        logits = self._logits(self._sent(e - 1 - self.start[:b]), self.mask[:b, self.low : e])
        self.last, logp = self._draw(logits, self._sent(noise))
        if self.kept is not None:
            for request, ids in zip(self.live, kept_sets(logits), strict=True):
                self.kept.setdefault(request.number, []).append(ids)
        results = torch.stack([self.last.double(), logp.double()]).cpu().numpy()
        self.tokens[:b, e], self.logp[:b, e] = results
        self.end = e + 1
        finished = (self.limit[:b] == self.end) | (self.tokens[:b, e, None] == self.eos).any(1)
        done = sorted({*finished.nonzero()[0].tolist(), *self._stopped()})
        return self._remove(done) if done else []

    def _stopped(self) -> list[int]:
        """The rows whose text now has a stop text. In `agro.door` each row has its own stop texts."""
        if not self.stops.texts:
            return []
        starts = enumerate(self.first[: len(self.live)])
        return [i for i, start in starts if self.stops.found(self.tokens[i], start, self.end)]

    def _draw(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the next tokens [b] of the live rows, and their log-probs; see `draw`."""
        return draw(logits, noise, self.sampler)

    def _logits(self, positions: Tensor, mask: Tensor) -> Tensor:
        """[b,V] after the last tokens, at `positions` [b]; `mask` [b,L] is added to attention."""
        if self.fused is not None:
            return self.fused.logits(self.last, positions, mask, self.cache)
        attention_mask = mask == 0
        if self.device.type != "cpu" and self.is_global and self.attention in ("sdpa", "eager", PACKED):
            # transformers inspects any other mask to see whether it is needed, which waits for the device.
            attention_mask = mask[:, None, None]
        hidden = self.policy.model.base_model(
            input_ids=self.last[:, None],
            attention_mask=attention_mask,
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return self.head.logits(hidden[:, -1])

    def _remove(self, done: list[int]) -> list[Finished]:
        results: list[Finished] = []
        for i in done:
            response = slice(self.first[i], self.end)
            kept = None if self.kept is None else self.kept.pop(self.live[i].number)
            # Copies: another row moves in.
            tokens, logp = self.tokens[i, response].copy(), self.logp[i, response].copy()
            results.append(Finished(self.live[i], tokens, logp, kept))
        holes, movers = close_ranks(self.live, done)
        if holes:
            for array in (self.tokens, self.logp, self.noise, self.start, self.first, self.limit):
                array[holes] = array[movers]
            to, source = self._sent(np.array([holes, movers]))
            self.last[to] = self.last[source]
            self.mask[to] = self.mask[source]
            window = slice(self.low, self.end)
            for layer in filter(HAS_KEYS, self.cache.layers):
                layer.keys[to, :, window] = layer.keys[source, :, window]
                layer.values[to, :, window] = layer.values[source, :, window]
        self.last = self.last[: len(self.live)]
        if self.live:
            self.low = int(self.start[: len(self.live)].min())  # the first column in use
        return results

    def _move(self, end: int, columns: int) -> None:
        """Resize the buffers to `columns`, and move the live ones so that the current one is `end`."""
        shift, old, new = end - self.end, slice(self.low, self.end), slice(self.low + end - self.end, end)
        tokens, logp = self.tokens, self.logp
        self.tokens, self.logp = np.zeros((self.size, columns), np.int64), np.zeros((self.size, columns))
        self.tokens[:, new], self.logp[:, new] = tokens[:, old], logp[:, old]
        for layer in filter(HAS_KEYS, self.cache.layers):
            for name in ("keys", "values"):
                buffer = getattr(layer, name)
                resized = buffer.new_zeros((*buffer.shape[:2], columns, buffer.shape[3]))
                resized[:, :, new] = buffer[:, :, old]
                setattr(layer, name, resized)
        for start in (self.start, self.first, self.limit):
            start += shift
        self.low, self.end, self.columns = self.low + shift, end, columns
        self.mask = self.mask.new_zeros((self.size, columns))
        self._hide(slice(0, len(self.live)))
