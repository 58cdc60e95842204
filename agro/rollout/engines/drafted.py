"""Decoding with a draft model that proposes tokens: speculative decoding (arXiv 2211.17192).

A step proposes k tokens a row with the draft, reads all of them with the policy in one pass, and draws the
policy's own token at each position. Draft and policy draw with the same noise, that of (seed, response,
position). The policy's tokens are kept up to the first that the draft didn't propose, that one included. So
tokens and log-probs are those of decoding without a draft (up to rounding), whatever the draft proposes.

Deviation from the paper: its rejection rule accepts a token with probability Σ min(p, q), but the responses
then depend on the draft. Equal noise accepts less: where both intervals of [0,1) overlap. For character
models of 2.4M and 56K parameters that is .49, with the rule .72, and with equal Gumbel noise, a number for
each token of the vocabulary, .68.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn.functional import pad

from agro.config import SamplerConfig
from agro.models.policy import Policy
from agro.rollout.engines.decoding_rows import Finished, Stops
from agro.rollout.engines.draw import draw, uniforms
from agro.rollout.engines.lane import Lane
from agro.rollout.engines.protocol import Request


class DraftDecoder:
    """The `live` requests are rows 0 … b-1 of the buffers. A row's tokens are in columns 0 … length-1."""

    def __init__(
        self, policy: Policy, draft: Policy, requests: Collection[Request], sampler: SamplerConfig, seed: int
    ) -> None:
        """`requests`: those known so far, for the sizes. No later one may have more room than these."""
        self.policy, self.sampler, self.seed = policy, sampler, seed
        self.count = sampler.draft_tokens
        self.live: list[Request] = []
        self.size = min(sampler.batch, len(requests))
        room = max(r.room for r in requests)
        self.room = room + self.count + 1  # proposals may exceed the end of a response
        columns = max(len(r.ids) for r in requests) + self.room
        self.target = Lane(policy, self.size, columns)
        self.draft = Lane(draft, self.size, columns)
        device = policy.device
        self.tokens = torch.zeros((self.size, columns), dtype=torch.long, device=device)
        self.logp = torch.zeros((self.size, columns), dtype=torch.float64, device=device)
        self.noise = torch.zeros((self.size, self.room), dtype=torch.float64, device=device)
        self.first, self.length, self.limit = torch.zeros((3, self.size), dtype=torch.long, device=device)
        self.eos = torch.tensor(policy.eos_ids, dtype=torch.long, device=device)
        self.stops = Stops(policy, sampler.stop)
        self.proposed = 0
        self.accepted = 0

    @property
    def free(self) -> int:
        return self.size - len(self.live)

    @torch.no_grad()
    def admit(self, wave: list[Request]) -> None:
        """Add requests, at most `free`."""
        missing = max(len(r.ids) for r in wave) + self.room - self.tokens.shape[1]
        if missing > 0:
            self.tokens, self.logp = pad(self.tokens, (0, missing)), pad(self.logp, (0, missing))
            self.target.widen(missing)
            self.draft.widen(missing)
        b, device = len(self.live), self.policy.device
        new = slice(b, b + len(wave))
        width = max(len(r.ids) for r in wave)
        padded = [r.ids + [0] * (width - len(r.ids)) for r in wave]
        self.tokens[new, :width] = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(r.ids) for r in wave], device=device)
        self.first[new] = lengths
        self.length[new] = lengths
        self.limit[new] = lengths + torch.tensor([r.room for r in wave], device=device)
        numbers, positions = [r.number for r in wave], [r.position for r in wave]
        noise = uniforms(self.seed, numbers, self.room, positions)
        self.noise[new] = torch.from_numpy(noise).to(device)
        self._prefill(wave, b)
        self.live += wave

    def _prefill(self, wave: list[Request], b: int) -> None:
        """Read the prompts, except for their last tokens, each once for all of its rows."""
        device = self.policy.device
        prompts = {id(r.ids): r.ids[:-1] for r in wave}
        width = max(map(len, prompts.values()))
        if width == 0:
            return
        ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts.values()], device=device)
        positions = torch.arange(width, device=device).expand(ids.shape)
        number = {key: b + i for i, key in enumerate(prompts)}
        source = torch.tensor([number[id(r.ids)] for r in wave], device=device)
        for lane in (self.target, self.draft):
            lane.hidden(ids, positions, first=b)
            lane.copy(torch.arange(b, b + len(wave), device=device), source)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """One or more tokens for every row; removes and returns the rows that finished."""
        b, k = len(self.live), self.count
        length = self.length[:b]
        proposed = self._propose()
        offsets = torch.arange(k + 1, device=length.device)
        positions = length[:, None] - 1 + offsets
        logits = self.target.head.logits(self.target.hidden(self.tokens[:b].gather(1, positions), positions))
        tokens, logp = draw(logits.flatten(0, 1), self._noise(positions + 1).flatten(), self.sampler)
        tokens, logp = tokens.view(b, k + 1), logp.view(b, k + 1)
        agreed = (tokens[:, :k] == proposed).int().cumprod(1).sum(1)
        new, finished = self._count(tokens, agreed + 1)
        self.tokens[:b].scatter_(1, positions + 1, tokens)
        self.logp[:b].scatter_(1, positions + 1, logp.double())
        if self.sampler.stop:
            new, finished = self._stopped(new, finished)
        self.length[:b] += new
        self.proposed += b * k
        self.accepted += int(torch.minimum(agreed, new).sum())
        finished = finished | (self.length[:b] == self.limit[:b])
        done = finished.nonzero()[:, 0].tolist()
        return self._remove(done) if done else []

    def _propose(self) -> Tensor:
        """[b,k] tokens that the draft draws, which are also put after the rows' tokens."""
        b = len(self.live)
        length = self.length[:b, None]
        # It hasn't read the last token but one where the policy accepted all that it proposed.
        positions = torch.cat([length - 2, length - 1], 1).clamp(min=0)
        for i in range(self.count):
            hidden = self.draft.hidden(self.tokens[:b].gather(1, positions), positions)[:, -1]
            logits = self.draft.head.logits(hidden)[:, : self.policy.vocab_size]
            positions = length + i
            tokens, _ = draw(logits, self._noise(positions)[:, 0], self.sampler)
            self.tokens[:b].scatter_(1, positions, tokens[:, None])
        return self.tokens[:b].gather(1, length + torch.arange(self.count, device=length.device))

    def _noise(self, positions: Tensor) -> Tensor:
        """The noise of the tokens in columns `positions` [b,q]."""
        b = len(positions)
        return self.noise[:b].gather(1, positions - self.first[:b, None])

    def _count(self, tokens: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """How many of at most `new` [b] tokens a response gets, and whether an end token ends it."""
        b = len(tokens)
        new = torch.minimum(new, self.limit[:b] - self.length[:b])
        is_end = (tokens[:, :, None] == self.eos).any(2)
        before_end = (is_end.int().cumsum(1) == 0).sum(1)
        return torch.minimum(new, before_end + 1), before_end < new

    def _stopped(self, new: Tensor, finished: Tensor) -> tuple[Tensor, Tensor]:
        """`_count`'s result, shortened where a stop text ends a response earlier."""
        new, finished = new.clone(), finished.clone()
        b = len(new)
        rows = zip(self.first[:b].tolist(), self.length[:b].tolist(), new.tolist())
        for i, (start, length, count) in enumerate(rows):
            for more in range(1, count + 1):
                if self.stops.found(self.tokens[i], start, length + more):
                    new[i], finished[i] = more, True
                    break
        return new, finished

    def _remove(self, done: list[int]) -> list[Finished]:
        results: list[Finished] = []
        for i in done:
            response = slice(int(self.first[i]), int(self.length[i]))
            # A copy: another row moves in.
            tokens, logp = self.tokens[i, response].clone(), self.logp[i, response].clone()
            results.append(Finished(self.live[i], tokens.cpu().numpy(), logp.cpu().numpy(), None))
        remaining = len(self.live) - len(done)
        holes = [i for i in done if i < remaining]
        movers = [i for i in range(remaining, len(self.live)) if i not in set(done)]
        if holes:
            for buffer in (self.tokens, self.logp, self.noise, self.first, self.length, self.limit):
                buffer[holes] = buffer[movers]
            for lane in (self.target, self.draft):
                lane.copy(torch.tensor(holes), torch.tensor(movers))
        for hole, mover in zip(holes, movers):
            self.live[hole] = self.live[mover]
        del self.live[remaining:]
        return results
