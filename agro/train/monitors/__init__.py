"""Monitors observe steps: before the weights move, and after a step is done."""

from agro.train.monitors.base import GO, Action, Monitor, View

__all__ = ["GO", "Action", "Monitor", "View"]
