"""What learns beside the policy changes what the table of systems says."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproductions.systems import learned
from reproductions.systems.tiny import rows_of

PARTS = (learned.rivals, learned.hacking, learned.flow, learned.props, learned.draft, learned.residual)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_all_that_is_measured_holds(part, tmp_path: Path) -> None:
    rows = list(rows_of(part, tmp_path))
    assert rows
    assert [row for row in rows if not row.holds] == []
