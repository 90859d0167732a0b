"""Cells of a session moved together, where it leaves pages part-filled.

Pages are left part-filled by whoever goes on behind cells that it may not write beside: each fork
whose parent is gone, each rollback beside a fork, each turn that was committed behind paid tokens.
There may be as many as there were such events, whoever still remembers them. Keys and values are
copied as they are; a cell keeps its position and its rotation and changes its page and place alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import numpy as np

from jaxstate.page_copy import PAGES_AT_ONCE, Part
from jaxstate.pages import Entry
from jaxstate.prefix_tree import join

Parts = list[Part]
"""For every PAGES_AT_ONCE pages a copy of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repacking:
    """What would move.

    Attributes:
      entries: the table as it is.
      old_pages: its part-filled pages that may be emptied, in order of position.
      cells: [moved] int32, in order of position: place in old_pages * page_size + cell.
      page_size: cells of a page.
    """

    entries: tuple[Entry, ...]
    old_pages: tuple[int, ...]
    cells: np.ndarray
    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages that the moved cells fill."""
        return -(-len(self.cells) // self.page_size)

    @property
    def gain(self) -> int:
        """Pages that it would free."""
        return len(self.old_pages) - self.num_pages

    def table(self, new_pages: Sequence[int]) -> tuple[Entry, ...]:
        """Return the table with the moved cells on new pages, filled from their beginnings."""
        moving = set(self.old_pages)
        table: list[Entry] = []
        place = 0
        for entry in self.entries:
            if entry.page not in moving:
                table.append(entry)
                continue
            position, end = entry.base + entry.first, entry.base + entry.fill
            while position < end:
                page, cell = divmod(place, self.page_size)
                count = min(end - position, self.page_size - cell)
                table.append(
                    Entry(new_pages[page], cell, cell + count, position - cell, entry.shift)
                )
                place, position = place + count, position + count
        return join(table)

    def content(self, parts: Parts) -> Parts:
        """Return what to write to the new pages, given a copy of the old ones."""
        last = -len(self.cells) % self.page_size
        cells = np.pad(self.cells, (0, last), mode="edge").reshape(-1, self.page_size)
        # As page_copy.padded repeats the last page.
        cells = np.pad(cells, ((0, -len(cells) % PAGES_AT_ONCE), (0, 0)), mode="edge")
        found: list[list[np.ndarray]] = [[] for _ in range(len(cells) // PAGES_AT_ONCE)]
        for arrays in zip(*parts, strict=True):
            whole = np.concatenate(arrays, axis=1)  # [heads, pages, page_size, head_dim]
            flat = whole.reshape(whole.shape[0], -1, whole.shape[-1])
            for index, part in enumerate(found):
                part.append(flat[:, cells[index * PAGES_AT_ONCE : (index + 1) * PAGES_AT_ONCE]])
        return list(found)


def repacking(entries: Sequence[Entry], own: Container[int], page_size: int) -> Repacking:
    """Find the part-filled pages of a table and the cells on them.

    Args:
      own: pages that nobody sees but by this table, or by one that goes on behind it.
    """
    seen: dict[int, int] = {}
    for entry in entries:
        seen[entry.page] = seen.get(entry.page, 0) + entry.fill - entry.first
    old = tuple(page for page, count in seen.items() if count < page_size and page in own)
    place = {page: index for index, page in enumerate(old)}
    cells = [
        place[entry.page] * page_size + np.arange(entry.first, entry.fill, dtype=np.int32)
        for entry in entries
        if entry.page in place
    ]
    return Repacking(
        entries=tuple(entries), old_pages=old, page_size=page_size,
        cells=np.concatenate([np.zeros(0, np.int32), *cells]),
    )  # fmt: skip
