"""A reference that a server holds: a teacher too large for this GPU scores the policy's own samples.

It is asked for the log-probs of given tokens, as a server is after a push (vLLM's `prompt_logprobs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout.engines.connection import Connection, Lost, dialect_of
from agro.rollout.engines.host import Scores, score
from agro.types import ROUNDING, KeptSets

TEXT = (
    "The quick brown fox: 12 + 34 = 46?\n¿Qué? 你好\t</s> <|im_end|>"  # whose tokens two tokenizers differ in
)
AT_ONCE = 32  # sequences


class ServedReference(Policy):
    """Log-probs of the model at the URL `policy.reference_model`; it has no weights and no logits here."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Raises `Refused` where the server doesn't answer, or has another tokenizer."""
        self.__dict__.update(policy.__dict__)
        self.value = self.masters = None
        self.url = str(config.policy.reference_model).rstrip("/").removesuffix("/v1")
        own = {"kind": "server", "dialect": "vllm", "api": "completions", "api_key": None}  # no other's key
        self.settings = config.engine.model_copy(update=own)
        self.dialect = dialect_of(self.settings, policy.eos_ids)
        self.served = asyncio.run(self._check())

    def streams(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        want: Collection[str] = ("logp",),
        reference: Policy | None = None,
        kept: KeptSets | None = None,
    ) -> dict[str, Tensor]:
        """See `Policy.streams`: of "logp" alone. Raises `Refused` for others, and where the server fails."""
        if set(want) != {"logp"} or kept is not None:
            self.hidden(tokens, lengths)
        rows = [row[:n].tolist() for row, n in zip(tokens.cpu(), lengths.tolist(), strict=True)]
        logp = torch.full(tokens.shape, torch.nan)
        for i, found in enumerate(asyncio.run(self._score(rows))):
            logp[i, 1 : len(found) + 1] = torch.tensor(found)
        return {"logp": torch.where(mask.cpu(), logp, torch.nan).to(self.device)}

    def hidden(self, tokens: Tensor, lengths: Tensor, *, packs: bool = True) -> Tensor:
        raise Refused(
            f"policy.reference_model = {self.url}: a server gives log-probs of the sampled tokens alone. "
            'What to do: objective.over = "samples", sampling without truncation, or a model in this process'
        )

    async def _score(self, rows: Sequence[list[int]]) -> Scores:
        connection, places = Connection(self.url, self.settings), asyncio.Semaphore(AT_ONCE)

        async def one(row: list[int]) -> list[float]:
            async with places:
                [found] = await score(connection, self.dialect, [row], self.served)
            if max(found, default=0.0) > ROUNDING:
                raise self._refused(f"expected log-probs, at most 0, got {max(found):g}")
            return found

        try:
            return list(await asyncio.gather(*map(one, rows)))
        except Lost as error:
            raise self._refused(error) from None
        finally:
            await connection.close()

    async def _check(self) -> str:
        """The server's name of its model, whose tokens must be ours."""
        connection = Connection(self.url, self.settings)
        try:
            name = await connection.request("/v1/models", read=lambda reply: str(reply["data"][0]["id"]))
            body = {"model": name, "prompt": TEXT, "add_special_tokens": False}
            theirs = await connection.request("/tokenize", body, lambda reply: reply["tokens"])
        except (Lost, LookupError, TypeError) as error:
            raise self._refused(error) from None
        finally:
            await connection.close()
        if theirs != self.tokenizer(TEXT, add_special_tokens=False)["input_ids"]:
            raise self._refused(f"expected the tokenizer of policy.model, got other tokens of {TEXT!r}")
        return str(name)

    def _refused(self, problem: object) -> Refused:
        return Refused(
            f"policy.reference_model = {self.url}: {problem}. What to do: start vLLM there with a model of "
            "the policy's tokenizer (vllm serve MODEL); then continue with --resume"
        )
