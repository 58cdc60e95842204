"""The trainer of reproductions/panel under the name that it imports."""

from reproductions.harness import SilentTrainer as SilentActivity

__all__ = ["SilentActivity"]
