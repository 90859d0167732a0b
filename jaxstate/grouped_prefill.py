"""Contexts with the same beginning that arrive together: one computes it, the others wait for it.

A pure function of what is under way, evaluated anew before every step. A leader that ends halfway
is simply not there any more: the first of those that waited goes on from what it left, and the
others wait for that one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxstate.session import common_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """A context to be computed from its start.

    Attributes:
      job_id: later ones are larger.
      tenant: who may share it.
      token_ids: [tokens] int32, the whole context.
      cells: most cells it can ever need.
      most: tokens it may take from others; one less than all where an output is wanted.
      common: with earlier jobs that were there when it came: job id to tokens in common.
    """

    job_id: int
    tenant: str
    token_ids: np.ndarray
    cells: int
    most: int
    common: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def beside(self, others: Sequence[Prefill]) -> Prefill:
        """Return it with what it has in common with others of its tenant."""
        common = {
            other.job_id: common_len(other.token_ids, self.token_ids[: self.most])
            for other in others
            if other.tenant == self.tenant
        }
        return dataclasses.replace(self, common=common)


def leaders(waiting: Mapping[int, int], prefills: Sequence[Prefill], least: int) -> dict[int, int]:
    """Choose for contexts that have not begun whom they wait for, if anybody.

    A context waits for the one under way, or before it in line, that will save it most tokens
    beyond those that are there already.

    Args:
      waiting: job id to tokens of its beginning that are there, of those that have not begun.
      prefills: all that are under way or wait.
      least: tokens that waiting must save; a step is longer than what fewer of them take.
    Returns:
      job id to the job id it waits for. Nobody waits for a later one, so nobody waits for ever.
    """
    alive = {prefill.job_id for prefill in prefills}
    found = {}
    for prefill in prefills:
        if prefill.job_id not in waiting:
            continue
        saved = {
            leader: common - waiting[prefill.job_id]
            for leader, common in prefill.common.items()
            if leader in alive and leader < prefill.job_id
        }
        leader = max(saved, key=lambda job_id: (saved[job_id], -job_id), default=None)
        if leader is not None and saved[leader] >= least:
            found[prefill.job_id] = leader
    return found
