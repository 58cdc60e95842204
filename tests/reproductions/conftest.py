from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the reproductions aren't installed


@pytest.fixture(autouse=True, scope="session")
def _forked_commands() -> Iterator[None]:
    """Their commands needn't import the libraries again."""
    from reproductions import harness

    def execute(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        is_python = command[0] == sys.executable
        return (forked.run if is_python else subprocess.run)(command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "subprocess", SimpleNamespace(run=execute))
        yield
