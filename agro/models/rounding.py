"""How far rounding moves a model's log-probs, measured on tokens that the model itself writes.

In 16 bits a correct pass of another shape is .001 nats a token off in one model and .3 in the next, and nats
off on tokens that no text has in a row. So no constant tells rounding from a defect. What does is the model
itself: its log-probs of the same tokens while each layer's output is rounded once more, up or down at random.
Correct passes differ by .1 to .5 of that, a missing layer, a wrong mask or a stale output layer by much more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

WRITTEN = 16  # tokens, the first of which isn't the model's
ALLOWED = 2  # times what rounding moves
_PASSES = 2


@torch.no_grad()
def written_rows(model: Any, lengths: Sequence[int], temperature: float) -> list[Tensor]:
    """Rows of tokens of these lengths, on the CPU, drawn from the model; longer ones repeat what it wrote."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    first = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    tokens = torch.full((len(lengths), 1), first)
    for _ in range(min(WRITTEN, max(lengths)) - 1):
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits[:, -1]
        probabilities = (logits.float().cpu() / temperature).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    return [torch.tensor(list(islice(cycle(row), n))) for row, n in zip(tokens.tolist(), lengths)]


@torch.no_grad()
def moved_by_rounding(model: Any, logp: Callable[[], Tensor], expected: Tensor) -> float:
    """Nats per token between the log-probs `expected` and those computed with rounding errors."""
    moved = []
    for seed in range(_PASSES):
        with _rounded(model, seed):
            moved.append((logp() - expected).abs().mean())
    return torch.stack(moved).mean().item()


@contextmanager
def _rounded(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Change each output of a layer by half a unit in its last place."""
    generator = torch.Generator().manual_seed(seed)

    def change(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        sign = torch.randint(0, 2, output.shape, generator=generator).to(output.device) - 0.5
        return (output.float() * (1 + torch.finfo(output.dtype).eps * sign)).to(output.dtype)

    leaves = [module for module in model.modules() if not next(module.children(), None)]
    hooks = [module.register_forward_hook(change) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
