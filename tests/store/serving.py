"""The owner of a store, served to tests of the same process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn

from agro.store.serving.app import BODY_BYTES, Application, listening, url_to
from agro.store.serving.owner import Owner
from agro.store.shared import beside

TOKEN = "a token of the tests"


@contextmanager
def served(path: Path, body_bytes: int = BODY_BYTES) -> Iterator[str]:
    """The URL of the owner of the store at `path`."""
    with listening("127.0.0.1", 0) as listener, closing(Owner(path)) as owner:
        app = Application(owner, TOKEN, beside(path), body_bytes).app
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.001)
        try:
            yield url_to("127.0.0.1", listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
