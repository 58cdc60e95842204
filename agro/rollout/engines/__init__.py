"""Engines generate tokens. An engine sees token ids only, no prompts and no records."""

from __future__ import annotations

from agro.rollout.engines.protocol import Continuation, Engine, NoServer, Request

__all__ = ["Continuation", "Engine", "NoServer", "Request"]
