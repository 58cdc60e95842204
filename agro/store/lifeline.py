"""The thread of a process that says, again and again, that the process lives. See `agro.store.leases`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from agro.errors import Refused
from agro.store.location import Location
from agro.store.store import Store

RENEWALS = 4  # of a lease before it runs out
RELEASE_SECONDS = 5.0  # that a process waits at its end for a store that others write to


@contextmanager
def leased(location: Location, name: str, seconds: float) -> Iterator[None]:
    """Have a lease of the store under `name` while the block runs. Raises `Refused` as `Store.open` does."""
    with Store.open(location) as store:
        store.leases.renew(name, seconds)
    ended = Event()
    thread = Thread(target=_renew, args=(location, name, seconds, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(seconds)


def _renew(location: Location, name: str, seconds: float, ended: Event) -> None:
    """Renew a lease until the end, then give it back. Where the store can't be reached it runs out."""
    while not ended.wait(seconds / RENEWALS):
        with suppress(Refused), Store.open(location, timeout=seconds) as store:
            store.leases.renew(name, seconds)
            while not ended.wait(seconds / RENEWALS):
                store.leases.renew(name, seconds)
    with suppress(Refused), Store.open(location, timeout=RELEASE_SECONDS) as store:
        store.leases.release(name)
