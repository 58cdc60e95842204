"""How a step is cut into forward passes: at most so many sequences and tokens, halved when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from agro.config import Train
from agro.errors import Refused

SEQUENCES = 16  # where the configuration names no limit
R = TypeVar("R")


class MicroBatch:
    """The limits of one forward pass; None is no limit. Neither changes a gradient but for rounding."""

    def __init__(
        self,
        sequences: int | None = None,
        tokens: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tokens`: padding included. `say` is told when memory ran out."""
        self.sequences, self.tokens, self.say = sequences, tokens, say
        self.adapts = True  # whether passes get smaller when memory runs out

    @classmethod
    def of(cls, config: Train, say: Callable[[str], None] = lambda text: None) -> MicroBatch:
        neither = config.micro_batch is None and config.micro_tokens is None
        return cls(SEQUENCES if neither else config.micro_batch, config.micro_tokens, say)

    def holds(self, sequences: int, width: int) -> bool:
        """Whether one pass may take so many sequences, the longest of `width` tokens."""
        return (self.sequences is None or sequences <= self.sequences) and (
            self.tokens is None or sequences * width <= self.tokens
        )

    def pack(self, blocks: Sequence[Sequence[int]], length: Sequence[int]) -> list[list[int]] | None:
        """Blocks of rows that must stay together, packed into passes, like lengths together; None where one doesn't fit.

        A single row that is too long goes alone.
        """
        widest = [max(length[r] for r in rows) for rows in blocks]
        out: list[list[int]] = []
        width = 0  # of the last pass, whose first block is its longest
        for i in sorted(range(len(blocks)), key=lambda i: -widest[i]):
            rows = list(blocks[i])
            if out and self.holds(len(out[-1]) + len(rows), width):
                out[-1] += rows
            elif len(rows) == 1 or self.holds(len(rows), widest[i]):
                out.append(rows)
                width = widest[i]
            else:
                return None
        return out

    def within_memory(self, work: Callable[[], R], step: int) -> R:
        """`work()`, again with smaller passes each time that memory runs out; `step`: the sequences of the whole step."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not (self.adapts and _is_out_of_memory(error)):
                    raise
                why = str(error).partition("\n")[0]
            # Only here are the failed pass's tensors gone, for the exception held them.
            self._halve(step, why)

    def _halve(self, step: int, why: str) -> None:
        before = min(self.sequences or step, step)
        if before == 1:
            raise Refused(
                f"out of memory on a single sequence ({why:.200}). What to do: a lower train.max_length, "
                "train.gradient_checkpointing = true, a lower policy.chunk, or an adapter ([policy.lora])"
            )
        self.sequences = -(-before // 2)
        self.tokens = None if self.tokens is None else -(-self.tokens // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        limits = f"{self.sequences} sequences" + (f" and {self.tokens} tokens" if self.tokens else "")
        self.say(
            f"out of memory: at most {limits} in a forward pass from now on, which doesn't change the result"
        )


def _is_out_of_memory(error: BaseException) -> bool:
    """Of an accelerator, which has a class for it, or of the CPU's allocator, which has only a message."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
