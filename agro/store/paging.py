"""Results of any size in pages: a list, and the cursor at which the next page begins.

Nothing stays open between two pages, so that a caller may write meanwhile, or never ask for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PAGE_ROWS = 256  # samples of a page
PAGE_BYTES = 1 << 24  # a page ends where its rows have more
PAGE_GROUPS = 256
PAGE_RESPONSES = 4096  # a page of groups ends where these have more
PAGE_ENTRIES = 4096  # rows of small tables, and what is known of samples


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a result. `cursor`: what the next page is asked for with; None after the last one."""

    items: list[T]
    cursor: int | None


def first_page(rows: Iterable[tuple[Any, ...]], most: int, size: int) -> Page[tuple[Any, ...]]:
    """The first `most` rows, or fewer that have `size` bytes; the cursor is the first column."""
    items, length = list[tuple[Any, ...]](), 0
    for row in rows:
        items.append(row)
        length += sum([len(value) for value in row if isinstance(value, (str, bytes))])
        if len(items) == most or length >= size:
            return Page(items, row[0])
    return Page(items, None)


def read_pages(read: Callable[[int], Page[T]]) -> Iterator[T]:
    """The items of all pages, of which it has one at a time. `read`: the page that begins at a cursor."""
    cursor: int | None = 0
    while cursor is not None:
        page = read(cursor)
        yield from page.items
        cursor = page.cursor
