"""Beginnings that several contexts share: a tree over token ids that knows the cells of each.

Only cells of position 0 and following may be in it, with shift 0, everything before them in place:
then they hold what any context with the same beginning would compute. The tree compares tokens, not
hashes, and keeps tenants apart.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxstate.pages import Entry, Pages, cut_end
from jaxstate.session import common_len

Table = tuple[Entry, ...]


@dataclasses.dataclass(kw_only=True, eq=False)
class _Node:
    """Tokens behind those of its ancestors, their cells, and when they were last of use."""

    token_ids: np.ndarray  # [tokens] int32
    entries: Table
    used: int
    parent: _Node | None
    children: dict[int, _Node] = dataclasses.field(default_factory=dict)  # by first token


class PrefixTree:
    """Keeps beginnings nobody uses at the moment, up to a number of pages.

    What was not of use for longest is dropped first, and all of it before anybody lacks a page.
    """

    def __init__(self, pages: Pages, max_pages: int):
        """Start empty; `pages` counts what the tree can give back as available."""
        self.max_pages = max_pages
        self._pages = pages
        self._roots: dict[str, _Node] = {}
        self.references: collections.Counter[int] = collections.Counter()  # by page
        self._clock = itertools.count()
        pages.spare = self

    @property
    def num_pages(self) -> int:
        """Pages that the tree refers to."""
        return len(self.references)

    def num_reclaimable(self, going: Mapping[int, int], enough: float) -> int:
        """See pages.Spare."""
        return self._pages.num_freed(self.references + collections.Counter(going))

    def tables(self) -> list[Table]:
        """Return the entries the tree holds, a table for each node."""
        return [node.entries for node in self._nodes()]

    def match(self, tenant: str, token_ids: np.ndarray) -> tuple[int, Table]:
        """Find the longest beginning that is kept: how many tokens, and their cells.

        The caller holds the entries at once: the next allocation may drop them here.
        """
        path, count = self._walk(tenant, token_ids)
        entries = [entry for node in path for entry in node.entries]
        return count, join(cut_end(entries, count))

    def keep(self, tenant: str, token_ids: np.ndarray, entries: Sequence[Entry]) -> None:
        """Hold the cells of a beginning, of what is not there yet, as far as the budget goes.

        Args:
          token_ids: [tokens] int32.
          entries: the table of these tokens, from position 0 on, all with shift 0.
        """
        most = self.max_pages * self._pages.page_size
        token_ids = np.asarray(token_ids[:most], np.int32)
        path, count = self._walk(tenant, token_ids)
        if count == len(token_ids):
            return
        parent = path[-1] if path else self._root(tenant)
        begin = sum(len(node.token_ids) for node in path)
        if begin > count:
            parent = self._split(parent, len(parent.token_ids) - (begin - count), count)
        node = _Node(
            token_ids=token_ids[count:].copy(), entries=_cut(entries, count, len(token_ids)),
            used=next(self._clock), parent=parent,
        )  # fmt: skip
        parent.children[int(node.token_ids[0])] = node
        self._hold(node)
        while self.num_pages > self.max_pages:
            self._drop_oldest()

    def reclaim(self, count: int) -> None:
        """Drop what was not of use for longest until `count` pages are free or nothing is left."""
        while self.references and self._pages.num_free < count:
            self._drop_oldest()

    def clear(self) -> None:
        """Drop everything."""
        while self.references:
            self._drop_oldest()

    def _root(self, tenant: str) -> _Node:
        nothing = np.zeros(0, np.int32)
        new = _Node(token_ids=nothing, entries=(), used=0, parent=None)
        return self._roots.setdefault(tenant, new)

    def _walk(self, tenant: str, token_ids: np.ndarray) -> tuple[list[_Node], int]:
        """Go down as far as tokens agree: the nodes passed, the last maybe in part, and tokens."""
        path: list[_Node] = []
        count = 0
        node = self._roots.get(tenant)
        while node is not None and count < len(token_ids):
            node = node.children.get(int(token_ids[count]))
            if node is None:
                break
            common = common_len(node.token_ids, token_ids[count:])
            node.used = next(self._clock)
            path.append(node)
            count += common
            if common < len(node.token_ids):
                break
        return path, count

    def _split(self, node: _Node, at: int, position: int) -> _Node:
        """Part a node before its token `at`, which stands at `position`; return the upper part."""
        assert node.parent is not None
        upper = _Node(
            token_ids=node.token_ids[:at].copy(), entries=cut_end(node.entries, position),
            used=node.used, parent=node.parent,
        )  # fmt: skip
        whole = node.entries
        end = position + len(node.token_ids) - at
        node.token_ids, node.entries = node.token_ids[at:].copy(), _cut(whole, position, end)
        self._hold(upper)
        self._hold(node)
        self._let_go(whole)
        upper.children[int(node.token_ids[0])] = node
        node.parent.children[int(upper.token_ids[0])] = upper
        node.parent = upper
        return upper

    def _hold(self, node: _Node) -> None:
        self._pages.hold(node.entries)
        self.references.update(entry.page for entry in node.entries)

    def _let_go(self, entries: Table) -> None:
        self._pages.drop(entries)
        self.references.subtract(entry.page for entry in entries)
        self.references += collections.Counter()  # without those that are at zero

    def _drop_oldest(self) -> None:
        leaf = min((n for n in self._nodes() if not n.children), key=lambda node: node.used)
        assert leaf.parent is not None
        del leaf.parent.children[int(leaf.token_ids[0])]
        self._let_go(leaf.entries)

    def _nodes(self) -> Iterator[_Node]:
        below = [node for root in self._roots.values() for node in root.children.values()]
        while below:
            node = below.pop()
            below.extend(node.children.values())
            yield node


def join(entries: Sequence[Entry]) -> Table:
    """Make one entry of those that continue each other within a page."""
    joined: list[Entry] = []
    for entry in entries:
        last = joined[-1] if joined else None
        if last and last._replace(first=entry.first, fill=entry.fill) == entry:
            if last.fill == entry.first:
                joined[-1] = last._replace(fill=entry.fill)
                continue
        joined.append(entry)
    return tuple(joined)


def _cut(entries: Sequence[Entry], begin: int, end: int) -> Table:
    """Return the table's cells at positions begin … end - 1."""
    kept = (
        entry._replace(first=max(entry.first, begin - entry.base))
        for entry in cut_end(entries, end)
    )
    return tuple(entry for entry in kept if entry.first < entry.fill)
