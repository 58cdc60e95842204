"""Where tokens come from: the protocol of an engine, and the embedded one. An engine knows no prompts and no records."""

from __future__ import annotations

from agro.engines.protocol import Decoded, Engine, Request

__all__ = ["Decoded", "Engine", "Request"]
