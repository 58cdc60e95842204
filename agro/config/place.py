"""The processes of a run that `agro train --place` starts."""

from __future__ import annotations

from agro.config.section import Count, Section, field


class PlaceConfig(Section):
    """How many processes `agro train --place` starts for a run, and how often it starts one again."""

    collectors: Count = field(1, resume=True, shared=True)
    """processes that sample and score; `--place local:2` sets 2"""
    ranks: Count = field(1, resume=True, shared=True)
    """processes that share the training, started by torchrun on the trainer's host"""
    servers: tuple[str, ...] = field((), resume=True, shared=True)
    """commands of servers that sample, such as "vllm serve MODEL --port 8001", each started on the trainer's
    host; engine.url names them"""
    restarts: int = field(5, resume=True, shared=True, ge=0)
    """how often a process that died is started again without a step of the run in between; one more death
    ends the run, which `--resume` continues"""
    address: str | None = field(None, resume=True, shared=True)
    """name or IP address under which other hosts reach the owner of the store; found out where it isn't
    given"""
    port: int = field(0, resume=True, shared=True, ge=0, le=65535)
    """of the owner of the store; 0: a free one"""
