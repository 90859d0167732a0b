"""Copies in host memory of cells that are in the pool: what stays the same is copied out once.

A session that comes back leaves its cells where it waited, as long as nobody needs that memory. Of
a page that it still has alone, and whose cells nobody wrote since, that is as good as a new copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from jaxstate.page_copy import PAGES_AT_ONCE
from jaxstate.pages import Pages, Stamp
from jaxstate.repack import Parts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostCopy:
    """What host memory has of a session's pages.

    Attributes:
      stamps: of the pages that were copied, in order: see Pages.stamp.
      parts: their content, see Executor.store_pages.
    """

    stamps: Mapping[int, Stamp]
    parts: Parts


def unchanged(
    pages: Pages, wanted: Collection[int], copy: HostCopy | None
) -> tuple[list[int], Parts]:
    """Find what a copy has of pages as they are.

    Args:
      wanted: pages that somebody holds.
    Returns:
      some of them, and their content; the content of the others can follow it. Only the last part
      of a content may be of less than PAGES_AT_ONCE pages.
    """
    found: list[int] = []
    parts: Parts = []
    if copy is None:
        return found, parts
    copied = list(copy.stamps)
    for index in range(0, len(copied), PAGES_AT_ONCE):
        some = copied[index : index + PAGES_AT_ONCE]
        is_last = len(found) + len(some) == len(wanted)
        if (len(some) == PAGES_AT_ONCE or is_last) and all(
            page in wanted and pages.stamp(page) == copy.stamps[page] for page in some
        ):
            found += some
            parts.append(copy.parts[index // PAGES_AT_ONCE])
    return found, parts
