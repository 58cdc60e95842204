"""How a step is split into forward passes, whose limits are halved when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from agro.config import TrainConfig
from agro.errors import Refused

TOKENS = 2048  # where the configuration names no limit
R = TypeVar("R")


class MicroBatch:
    """The limits of one forward pass; None is no limit. They change a gradient by rounding only."""

    def __init__(
        self,
        sequences: int | None = None,
        tokens: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tokens`: padding included. `say` reports that memory ran out."""
        self.sequences, self.tokens, self.say = sequences, tokens, say
        self.adapts = True  # whether passes get smaller when memory runs out

    @classmethod
    def of(cls, config: TrainConfig, say: Callable[[str], None] = lambda text: None) -> MicroBatch:
        neither = config.micro_batch is None and config.micro_tokens is None
        return cls(config.micro_batch, TOKENS if neither else config.micro_tokens, say)

    def holds(self, sequences: int, width: int) -> bool:
        """Whether one pass may have so many sequences, the longest of `width` tokens."""
        if self.sequences is not None and sequences > self.sequences:
            return False
        return self.tokens is None or sequences * width <= self.tokens

    def pack(self, blocks: Sequence[Sequence[int]], length: Sequence[int]) -> list[list[int]] | None:
        """Pack blocks of rows that must stay together into passes; blocks of similar length share a pass.

        A single row that is too long is a pass of its own. None where a larger block doesn't fit.
        """
        widest = [max(length[r] for r in rows) for rows in blocks]
        passes: list[list[int]] = []
        width = 0  # of the last pass, whose first block is its longest
        for i in sorted(range(len(blocks)), key=lambda i: -widest[i]):
            rows = list(blocks[i])
            if passes and self.holds(len(passes[-1]) + len(rows), width):
                passes[-1] += rows
            elif len(rows) == 1 or self.holds(len(rows), widest[i]):
                passes.append(rows)
                width = widest[i]
            else:
                return None
        return passes

    def within_memory(self, work: Callable[[], R], step: int) -> R:
        """`work()`, repeated with smaller passes when memory runs out. `step`: sequences of the step."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                has_class = isinstance(error, (torch.OutOfMemoryError, MemoryError))  # the CPU's has none
                if not self.adapts or not (has_class or "can't allocate memory" in str(error)):
                    raise
                message = str(error).partition("\n")[0]
            # Only here are the failed pass's tensors freed: the exception referred to them.
            previous = min(self.sequences or step, step)
            if previous == 1:
                raise Refused(
                    f"out of memory on a single sequence ({message:.200}). What to do: a lower "
                    "train.max_length, train.gradient_checkpointing = true, a lower policy.chunk, or an "
                    "adapter ([policy.lora])"
                )
            self.sequences = -(-previous // 2)
            self.tokens = None if self.tokens is None else -(-self.tokens // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            limits = f"{self.sequences} sequences" + (f" and {self.tokens} tokens" if self.tokens else "")
            end = "in a forward pass from here on, which doesn't change the result"
            self.say(f"out of memory: at most {limits} {end}")
