"""The record of experience: `Prompt`, `Sample`, `Batch`.

Axes, in docstrings and as suffixes: B sequences, N responses (one or more sequences), T tokens, V vocabulary,
G groups (all responses to one prompt), P pairs. Index t of every log-prob is the log-prob of tokens[t] given
tokens[<t], in nats; a first token has none. What is unknown is None in a record and NaN in a tensor, never 0.

torch takes seconds to import, and only `Batch` needs it, so code that handles only records doesn't load it.
"""

from typing import TYPE_CHECKING, Any

from agro.types.conversation import Messages, Prompt, Text, check_turns, conversation, prompt_hash
from agro.types.ends import End, end_in, thought_in, without_open_thought
from agro.types.kept_sets import KeptSets
from agro.types.sample import ROLES, ROUNDING, UNKNOWN_VERSION, Role, Sample, truncation

if TYPE_CHECKING:
    from agro.types.batch import Batch, Tensor

__all__ = ["ROLES", "ROUNDING", "UNKNOWN_VERSION", "Batch", "Messages", "Prompt", "Role", "Sample", "Text"]
__all__ += ["End", "KeptSets", "Tensor", "check_turns", "conversation", "end_in", "prompt_hash"]
__all__ += ["thought_in", "truncation", "without_open_thought"]


def __getattr__(name: str) -> Any:
    if name not in ("Batch", "Tensor"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agro.types import batch

    return getattr(batch, name)
