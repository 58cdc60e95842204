"""Training: the loop (read `loop.py` first), the step, checkpoints and the run folder."""

from agro.train.loop import Interrupted, Trainer
from agro.train.step import Step, backward, collate, streams_of

__all__ = ["Interrupted", "Step", "Trainer", "backward", "collate", "streams_of"]
