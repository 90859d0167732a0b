"""Copies in host memory of cells that are in the pool: what stays the same is copied out once.

A session that comes back leaves its cells where it waited, as long as nobody needs that memory. Of
a page that it still has alone, and whose cells nobody wrote since, that is as good as a new copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from jaxstate.executor import Executor
from jaxstate.page_copy import PAGES_AT_ONCE
from jaxstate.pages import Pages, Stamp
from jaxstate.repack import Parts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostCopy:
    """What host memory has of a session's pages.

    Attributes:
      stamps: of the pages that were copied, in order: see Pages.stamp.
      parts: their content, see Executor.store_pages.
      num_bytes: of the content.
    """

    stamps: Mapping[int, Stamp]
    parts: Parts
    num_bytes: int


def take(
    executor: Executor, pages: Pages, wanted: Collection[int], copy: HostCopy | None
) -> tuple[tuple[int, ...], Parts]:
    """Copy pages out of the pool, but for those that a copy has as they are.

    Args:
      wanted: pages that somebody holds.
    Returns:
      the pages, each once, in the order of the content behind them; see Executor.store_pages.
    """
    kept: list[int] = []
    parts: Parts = []
    last: tuple[list[int], Parts] = [], []
    copied = list(copy.stamps) if copy else []
    for index in range(0, len(copied), PAGES_AT_ONCE):
        assert copy is not None
        some = copied[index : index + PAGES_AT_ONCE]
        if all(page in wanted and pages.stamp(page) == copy.stamps[page] for page in some):
            part = copy.parts[index // PAGES_AT_ONCE]
            if len(some) < PAGES_AT_ONCE:  # has to stay the last
                last = some, [part]
            else:
                kept += some
                parts.append(part)
    if set(wanted) == {*kept, *last[0]}:
        return (*kept, *last[0]), [*parts, *last[1]]
    rest = sorted(set(wanted) - set(kept))
    return (*kept, *rest), [*parts, *executor.store_pages(rest)]
