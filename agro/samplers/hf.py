"""The embedded sampler: its own decode loop on a transformers model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from agro.errors import Refused
from agro.policy import Policy
from agro.samplers.options import Sampling
from agro.samplers.rows import Finished, Request, Rows
from agro.types import Prompt, Sample


class HFSampler:
    """Samples from a `Policy` in this process. The weights must not change while an iterator of `sample` is read."""

    def __init__(self, policy: Policy, version: int = -1) -> None:
        """Raises `Refused` for an architecture that can't be decoded as it is trained."""
        self.policy = policy
        self.version = version
        layers = {type(layer) for layer in DynamicCache(config=policy.model.config).layers}
        if foreign := sorted(kind.__name__ for kind in layers - {DynamicLayer, DynamicSlidingWindowLayer}):
            raise Refused(
                f"{policy.name}: expected a model whose only memory is the keys and values of each layer, got "
                f"{', '.join(foreign)}; sample from it elsewhere and import the responses"
            )
        self._probe()

    def sample(self, prompts: Sequence[Prompt], n: int, options: Sampling) -> Iterator[Sample]:
        """See `agro.samplers.Sampler`. `behavior_logp` is under the distribution sampled from: 0 where it is greedy.

        Raises `Refused` before anything is computed where a prompt leaves no room in the model's context. A response
        whose room is shorter than `max_new` ends there, with "length". The text of a response stops short of a stop
        text; its tokens stay as they were sampled.
        """
        requests = self.requests(prompts, n, options)
        return (self._sample(done, options) for done in self.decode(deque(requests), options))

    def requests(self, prompts: Sequence[Prompt], n: int, options: Sampling) -> list[Request]:
        """`n` requests a prompt, or `Refused` where a prompt leaves no room in the model's context."""
        requests = []
        for i, prompt in enumerate(prompts):
            ids = self.policy.encode_prompt(prompt.text)
            room = min(options.max_new, self.policy.context - len(ids))
            if room < 1:
                raise Refused(
                    f"prompt {prompt.id}: {len(ids)} tokens leave no room for a response in the model's context of "
                    f"{self.policy.context}; shorten it, or leave it out"
                )
            requests += [Request(i * n + j, prompt, ids, room) for j in range(n)]
        return requests

    def decode(self, waiting: deque[Request], options: Sampling) -> Iterator[Finished]:
        """Serve what waits, from the left; the reader may put more there meanwhile, as long as anything is decoded."""
        if not waiting:
            return
        version = self.version
        rows = Rows(self.policy, waiting, options)
        while waiting or rows.live:
            if waiting and rows.free >= max(1, rows.size // 4):
                rows.admit([waiting.popleft() for _ in range(min(rows.free, len(waiting)))])
            for done in rows.step():
                if self.version != version:
                    raise RuntimeError(
                        f"version {self.version} arrived while version {version} was being sampled from"
                    )
                yield done

    def _probe(self) -> None:
        """Raise `Refused` unless a few tokens have the log-probs that the trainer gives them."""
        policy, ids = (
            self.policy,
            [i % self.policy.vocab_size for i in range(min(3, self.policy.context - 2))],
        )
        requests = [Request(i, Prompt(""), prompt, 2) for i, prompt in enumerate((ids, ids[:1]))]
        rows = Rows(policy, requests, Sampling(temperature=policy.temperature, max_new=2))
        rows.admit(requests)
        difference, finished = 0.0, []
        while rows.live:
            finished += rows.step()
        for done in finished:
            tokens = torch.tensor([[*done.request.ids, *done.tokens.tolist()]])
            mask = torch.arange(tokens.shape[1])[None] >= len(done.request.ids)
            with torch.no_grad():
                own = policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"]
            difference = max(
                difference, float((own[mask.to(own.device)].cpu() - torch.tensor(done.logp)).abs().max())
            )
        if not difference <= (
            1e-3 if torch.finfo(policy.dtype).bits > 16 else 0.5
        ):  # gross errors, not rounding
            raise Refused(
                f"{policy.name}: decoded token by token, its log-probs differ by {difference:.3g} nats from those of "
                "whole sequences; sample from it elsewhere and import the responses"
            )

    def _sample(self, done: Finished, options: Sampling) -> Sample:
        request, ids = done.request, done.tokens.tolist()
        text, stopped = options.before_stop(self.policy.decode(ids))
        finish = "stop" if stopped or ids[-1] in self.policy.eos_ids else "length"
        before = len(request.ids)
        return Sample(
            prompt=request.prompt.text,
            response=text,
            prompt_id=request.prompt.id,
            tokens=np.concatenate([np.array(request.ids, np.int32), done.tokens.astype(np.int32)]),
            action=np.arange(before + len(ids)) >= before,
            tokenizer=self.policy.fingerprint,
            behavior_logp=np.concatenate([np.full(before, np.nan, np.float32), done.logp.astype(np.float32)]),
            sampling=options.as_json(),
            version=self.version,
            role="policy",
            source="policy",
            meta={**request.prompt.columns, "finish": finish, "index": request.number},
        )
