"""Decoding with a draft model that proposes tokens: speculative decoding (arXiv 2211.17192).

In a step the draft proposes k tokens per row, the policy reads all of them in one pass, and draws its own
token at each position. Draft and policy draw with the same noise, a function of (seed, response, position).
The row keeps the policy's tokens up to and including the first that the draft didn't propose. So
tokens and log-probs equal those of decoding without a draft (up to rounding), whatever the draft proposes.

Deviation from the paper: its rejection rule accepts a token with probability Σ min(p, q), but the responses
then depend on the draft. Equal noise accepts less, the overlap of both intervals of [0,1). For character
models of 2.4M and 56K parameters it accepts .49, the rule .72, and equal Gumbel noise, with a number for
each token of the vocabulary, .68.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from agro.config import PolicyConfig, SamplerConfig
from agro.errors import Refused
from agro.models.logprobs import Head
from agro.models.policy import Policy
from agro.models.pretrained import refusing_errors
from agro.rollout.engines import Continuation, Request
from agro.rollout.engines.decoding_rows import ColumnsLayer, Decoder, Finished, Stops, close_ranks
from agro.rollout.engines.draw import draw, uniforms
from agro.rollout.engines.hf import HF


class _LaneLayer(ColumnsLayer):
    """Several tokens of each row per pass, each in the column of its position."""

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
    """One model's keys and values of `size` sequences of different lengths; several tokens of each per pass.

    The token at position p is in column p, so later tokens overwrite rejected proposals.
    """

    def __init__(self, policy: Policy, size: int, columns: int) -> None:
        """Raises `Refused` for a model with layers that don't attend to the complete sequence."""
        self.policy, self.size, self.columns = policy, size, columns
        config = policy.model.config
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        foreign = sorted(kind.__name__ for kind in kinds - {DynamicLayer})
        if foreign:
            raise Refused(
                f"engine drafted: expected models whose layers attend to all earlier tokens, but "
                f'{policy.name} has {", ".join(foreign)}; use engine.kind = "hf"'
            )
        self.rows = slice(0, 0)
        self.at_bq = torch.zeros((0, 1), dtype=torch.long, device=policy.device)
        self.end = 1
        count = config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[_LaneLayer(self) for _ in range(count)])
        self.head = Head.of(policy.model)

    def hidden(self, tokens_bq: Tensor, at_bq: Tensor, end: int, row: int = 0) -> Tensor:
        """[b,q] tokens at positions `at_bq` of the sequences row, row + 1, … -> [b,q,H] hidden states.

        `end`: one more than the largest of these positions.
        """
        b, q = tokens_bq.shape
        self.rows, self.at_bq, self.end = slice(row, row + b), at_bq, end
        seen = torch.arange(self.end, device=at_bq.device) <= at_bq[:, :, None]
        dtype = self.policy.dtype
        mask = torch.zeros((b, 1, q, self.end), dtype=dtype, device=at_bq.device)
        mask.masked_fill_(~seen[:, None], torch.finfo(dtype).min)
        return self.policy.model.base_model(  # type: ignore[no-any-return]
            input_ids=tokens_bq,
            attention_mask=mask,
            # Positions beyond the context hold only proposals after the end of the response.
            position_ids=at_bq.clamp(max=self.policy.context - 1),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy the keys and values of the sequences `source` to the sequences `to`."""
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


class DraftDecoder:
    """The `live` requests are rows 0 … b-1 of the buffers. A row's tokens fill columns 0 … length-1."""

    def __init__(
        self,
        policies: tuple[Policy, Policy],
        count: int,
        requests: Collection[Request],
        sampler: SamplerConfig,
        seed: int,
    ) -> None:
        """`policies`: the policy and its draft, which proposes `count` tokens at once. `requests`: the known
        ones, which set the sizes. No later one may have more room than these."""
        policy, draft = policies
        self.policy, self.sampler, self.seed = policy, sampler, seed
        self.count = count
        self.live: list[Request] = []
        self.size = min(sampler.batch, len(requests))
        room = max(r.room for r in requests)
        self.room = room + self.count + 1  # proposals may exceed the end of a response
        columns = max(len(r.ids) for r in requests) + self.room
        self.target = Lane(policy, self.size, columns)
        self.draft = Lane(draft, self.size, columns)
        self.device = policy.device
        # On the CPU: the rows' tokens and log-probs, where responses begin, and the rows' largest lengths.
        self.ids = np.zeros((self.size, columns), np.int64)
        self.logp = np.zeros((self.size, columns))
        self.first, self.length, self.limit = np.zeros((3, self.size), np.int64)
        self.eos = np.array(policy.eos_ids, np.int64)
        self.tokens = torch.zeros((self.size, columns), dtype=torch.long, device=self.device)
        self.noise = torch.zeros((self.size, self.room), dtype=torch.float64, device=self.device)
        self.stops = Stops(policy, sampler.stop)
        self.proposed = 0
        self.accepted = 0

    @property
    def free(self) -> int:
        return self.size - len(self.live)

    @torch.no_grad()
    def admit(self, wave: list[Request]) -> None:
        """Add at most `free` requests."""
        missing = max(len(r.ids) for r in wave) + self.room - self.tokens.shape[1]
        if missing > 0:
            self.ids = np.pad(self.ids, ((0, 0), (0, missing)))
            self.logp = np.pad(self.logp, ((0, 0), (0, missing)))
            self.tokens = pad(self.tokens, (0, missing))
            self.target.widen(missing)
            self.draft.widen(missing)
        b = len(self.live)
        new = slice(b, b + len(wave))
        for row, r in enumerate(wave, b):
            self.ids[row, : len(r.ids)] = r.ids
        self.tokens[new] = self._sent(self.ids[new])
        self.first[new] = self.length[new] = [len(r.ids) for r in wave]
        self.limit[new] = self.first[new] + [r.room for r in wave]
        numbers, positions = [r.number for r in wave], [r.position for r in wave]
        self.noise[new] = self._sent(uniforms(self.seed, numbers, self.room, positions))
        self._prefill(wave, b)
        self.live += wave

    def _sent(self, values: NDArray[Any]) -> Tensor:
        """The values on the models' device, without waiting for it."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _prefill(self, wave: list[Request], b: int) -> None:
        """Read the prompts without their last tokens, each once for all of its rows."""
        prompts = {id(r.ids): r.ids[:-1] for r in wave}
        width = max(map(len, prompts.values()))
        if width == 0:
            return
        ids = self._sent(np.array([p + [0] * (width - len(p)) for p in prompts.values()]))
        positions = torch.arange(width, device=self.device).expand(ids.shape)
        number = {key: b + i for i, key in enumerate(prompts)}
        rows = np.array([(b + i, number[id(r.ids)]) for i, r in enumerate(wave)])
        for lane in (self.target, self.draft):
            lane.hidden(ids, positions, width, row=b)
            lane.copy(*self._sent(rows.T))

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """One or more tokens for every row; removes and returns the rows that finished."""
        b, k = len(self.live), self.count
        ends = self.length[:b]
        sent = self._sent(np.stack([ends, ends - self.first[:b]]))  # and tokens of the response so far
        length, noise = sent[0], self.noise[:b]
        proposed = self._propose(length, noise, sent[1])
        offsets = torch.arange(k + 1, device=self.device)
        positions = length[:, None] - 1 + offsets
        read = self.tokens[:b].gather(1, positions)
        logits = self.target.head.logits(self.target.hidden(read, positions, int(ends.max()) + k))
        own_noise = noise.gather(1, sent[1][:, None] + offsets)
        tokens, logp = draw(logits.flatten(0, 1), own_noise.flatten(), self.sampler)
        tokens, logp = tokens.view(b, k + 1), logp.view(b, k + 1)
        self.tokens[:b].scatter_(1, positions + 1, tokens)
        # One copy, which waits: tokens, their log-probs, and the proposals.
        copied = torch.cat([tokens.double(), logp.double(), proposed.double()], 1).cpu().numpy()
        sampled, agreed = copied[:, : k + 1], copied[:, :k] == copied[:, 2 * k + 2 :]
        columns = ends[:, None] + np.arange(k + 1)
        self.ids[np.arange(b)[:, None], columns] = sampled
        self.logp[np.arange(b)[:, None], columns] = copied[:, k + 1 : 2 * k + 2]
        agreed = agreed.cumprod(1).sum(1)
        # The number of new tokens per response: up to its limit, its first end token and its first stop text.
        new = np.minimum(agreed + 1, self.limit[:b] - ends)
        before_end = ((sampled[:, :, None] == self.eos).any(2).cumsum(1) == 0).sum(1)
        finished = before_end < new
        new = np.minimum(new, before_end + 1)
        for i, count in enumerate(new.tolist() if self.sampler.stop else ()):
            for more in range(1, count + 1):
                if self.stops.found(self.ids[i], self.first[i], ends[i] + more):
                    new[i], finished[i] = more, True
                    break
        self.length[:b] += new
        self.proposed += b * k
        self.accepted += int(np.minimum(agreed, new).sum())
        done = (finished | (self.length[:b] == self.limit[:b])).nonzero()[0].tolist()
        return self._remove(done) if done else []

    def _propose(self, length: Tensor, noise: Tensor, sampled: Tensor) -> Tensor:
        """[b,k] tokens that the draft draws; they are also written after the rows' tokens.

        `length` [b] tokens of the rows, `sampled` [b] of them in the response.
        """
        b, longest = len(self.live), int(self.length[: len(self.live)].max())
        # The draft hasn't read the second-to-last token if the policy accepted all its proposals.
        positions = torch.stack([length - 2, length - 1], 1).clamp(min=0)
        proposed = []
        for i in range(self.count):
            read = self.tokens[:b].gather(1, positions)
            hidden = self.draft.hidden(read, positions, longest + i)[:, -1]
            logits = self.draft.head.logits(hidden)[:, : self.policy.vocab_size]
            tokens, _ = draw(logits, noise.gather(1, sampled[:, None] + i)[:, 0], self.sampler)
            proposed.append(tokens)
            positions = length[:, None] + i
            self.tokens[:b].scatter_(1, positions, tokens[:, None])
        return torch.stack(proposed, 1)

    def _remove(self, done: list[int]) -> list[Finished]:
        results: list[Finished] = []
        for i in done:
            response = slice(self.first[i], self.length[i])
            # A copy, since another row moves here.
            tokens, logp = self.ids[i, response].copy(), self.logp[i, response].copy()
            results.append(Finished(self.live[i], tokens, logp, None))
        holes, movers = close_ranks(self.live, done)
        if holes:
            for array in (self.ids, self.logp, self.first, self.length, self.limit):
                array[holes] = array[movers]
            to, source = self._sent(np.array([holes, movers]))
            for buffer in (self.tokens, self.noise):
                buffer[to] = buffer[source]
            for lane in (self.target, self.draft):
                lane.copy(to, source)
        return results


class Drafted(HF):
    """The embedded engine with a draft model, `engine.kind = "drafted"`."""

    can: ClassVar = HF.can - {"reports_kept_sets"}
    mode: ClassVar = "with a draft"

    def __init__(self, policy: Policy, version: int = -1, *, model: str, tokens: int = 4) -> None:
        """Raises `Refused` for a draft with another vocabulary, or if the policy reads several tokens at once
        differently than one by one.

        Args:
            model: folder or Hub name of a small model with the same vocabulary.
            tokens: number of tokens that it proposes at once.
        """
        if tokens < 1:
            raise Refused(f"engine.options: tokens: expected 1 or more, got {tokens}")
        self.tokens = tokens
        self._decoder: DraftDecoder | None = None
        dtype = "bfloat16" if policy.dtype == torch.bfloat16 else "float32"
        self.draft = Policy.load(PolicyConfig(model=model, dtype=dtype, device=str(policy.device), threads=0))
        check_vocabulary(policy, self.draft, model)
        with refusing_errors(policy.name, "sampling with a draft model"):
            super().__init__(policy, version, fused=False)

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        self.measured = {"requests_failed": 0, "draft_accepted": None}
        try:
            yield from super().decode(waiting, sampler, seed)
            if self._decoder is not None and self._decoder.proposed:
                share = self._decoder.accepted / self._decoder.proposed
                self.measured = {**self.measured, "draft_accepted": share}
        finally:
            self._decoder = None  # keys and values may be gigabytes

    def rows(self, waiting: deque[Request], sampler: SamplerConfig, seed: int, *, fused: bool) -> Decoder:
        self._decoder = DraftDecoder((self.policy, self.draft), self.tokens, waiting, sampler, seed)
        return self._decoder


def check_vocabulary(policy: Policy, draft: Policy, name: str) -> None:
    """Raise `Refused` unless the draft model's tokens are the policy's."""
    vocabulary, other = policy.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if vocabulary == other:
        return
    differing = [token for token in vocabulary | other if vocabulary.get(token) != other.get(token)]
    raise Refused(
        f"engine.options: model: {name}: expected a model with the policy's vocabulary of {len(vocabulary)} "
        f"tokens, got {len(other)} tokens, {len(differing)} of which differ (as {min(differing)!r}); use "
        "a smaller model of the same family"
    )
