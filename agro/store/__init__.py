"""The store of experience, and what goes into and out of it."""

from agro.store.exchange import read, write
from agro.store.records import Commit, Counts, Group, Pair, Rewound
from agro.store.select import DrawRule
from agro.store.sqlite import Store

__all__ = ["Commit", "Counts", "DrawRule", "Group", "Pair", "Rewound", "Store", "read", "write"]
