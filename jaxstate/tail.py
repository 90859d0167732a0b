"""New tokens behind a context, on pages of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence

import jax
import numpy as np

from jaxstate import pages as pages_module
from jaxstate.choices import ChoiceTree, TreePart, tree_parts
from jaxstate.errors import PoolLostError
from jaxstate.executor import Executor, StepResult
from jaxstate.needs import Need, Ran
from jaxstate.pages import Entry, Pages
from jaxstate.rows import RowInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken:
    """The distribution after a token: one row of a gate summary, and how to get its logits."""

    top_id: int
    gap: float
    lse: float
    row_logits: Callable[[], jax.Array]  # fetches the logits, [vocab] f32, on the device

    @classmethod
    def of(cls, result: StepResult, row: int) -> NextToken:
        """Read one row of a step's result."""
        summary = result.summary
        top = summary.top_logits[row]
        return cls(
            top_id=int(summary.top_ids[row, 0]),
            gap=float(top[0] - top[1]),
            lse=float(summary.lse[row]),
            row_logits=lambda: result.row_logits(row),
        )

    def among(self, allowed_bits: np.ndarray, executor: Executor) -> NextToken:
        """Return the distribution over some of the tokens, see sampling.restrict."""
        logits, (ids, best, lse) = executor.restrict(self.row_logits(), allowed_bits)
        return NextToken(
            top_id=int(ids[0]),
            gap=float(min(best[0] - best[1], 1e4)),  # a single one would lead by infinity
            lse=float(lse),
            row_logits=lambda: logits,
        )


class Tail:
    """New tokens behind a context, on pages of their own; the context's cells are never written.

    All pages the tail may need are taken at once, so that it cannot run dry on the way.
    """

    def __init__(
        self,
        executor: Executor,
        pages: Pages,
        owner: int,
        context: Sequence[Entry],
        position: int,
        shifts: np.ndarray,
        *,
        growing: bool = False,
        selects: bool = False,
    ):
        """Reserve cells for len(shifts) tokens at `position` and following.

        Args:
          growing: see Pages.allocate.
          selects: see RowInput.
        Raises:
          CapacityError, PoolFullError: see Pages.require; nothing was taken.
        """
        self._executor = executor
        self._pools_lost = executor.pools_lost
        self._largest_shape = executor.config.step_shapes[-1]
        self._num_cells = executor.config.num_cells
        self._pages = pages
        self.owner = owner
        self._begin = position
        self._selects = selects
        self._growth = None
        if len(shifts):
            needed = pages_module.pages_needed(pages, owner, context, position, shifts)
            pages.require(needed, (), staying=context)
            self._growth = pages_module.plan_growth(
                pages, owner, context, position, shifts, growing=growing
            )
        self._all_entries = self._growth.entries if self._growth else tuple(context)
        pages.hold(self._all_entries)
        self.position = position
        self.tokens_forwarded = 0

    def entries(self) -> tuple[Entry, ...]:
        """Return the table of context and tail up to the last forwarded token."""
        return pages_module.cut_end(self._all_entries, self.position)

    def close(self) -> None:
        """Give back every cell."""
        self._pages.drop(self._all_entries)
        self._all_entries = ()

    def keep(self) -> tuple[Entry, ...]:
        """End the tail but keep what was forwarded: the caller holds the returned entries."""
        entries = self.entries()
        self._pages.hold(entries)
        self.close()
        return entries

    def split_tree(self, tree: ChoiceTree) -> list[TreePart]:
        """Split a choice tree into parts that fit a step behind a question's last token."""
        largest = self._largest_shape
        return tree_parts(tree, largest.num_rows - 1, largest.num_tokens - 1)

    def forward(
        self,
        token_ids: Sequence[int] | np.ndarray,
        *,
        want_last: bool,
        nodes: TreePart | None = None,
    ) -> Generator[Need, Ran, StepResult | None]:
        """Need tokens forwarded; return the result of the step that held the last one.

        Args:
          want_last: the distribution after the last token is wanted (output row 0).
          nodes: tree tokens to forward behind the last token in the same step, not kept.
        Raises:
          PoolLostError: the pool was lost since the tail was begun, by whatever was run meanwhile.
        """
        self._check_pool()
        ids = np.asarray(token_ids, np.int32)
        extra = len(nodes.token_ids) if nodes else 0
        outputs = int(want_last and len(ids) > 0) + (len(nodes.wanted) if nodes else 0)
        result = None
        while len(ids) or (extra and result is None):
            # Nodes go with the last token, all of them.
            ran = yield Need(
                tokens=len(ids) + extra,
                least=1 if len(ids) > 1 else len(ids) + extra,
                outputs=outputs,
                row=functools.partial(self._row, ids, want_last=want_last, nodes=nodes),
            )
            self._check_pool()
            count = min(ran.tokens, len(ids))
            self.position += count
            self.tokens_forwarded += ran.tokens
            last = count == len(ids)
            ids = ids[count:]
            if last:
                result = ran.result
        return result

    def _check_pool(self) -> None:
        if self._executor.pools_lost != self._pools_lost:
            raise PoolLostError(
                "the pool was lost on the device while this was running; ask again, what it held "
                "is rebuilt"
            )

    def _row(
        self, ids: np.ndarray, limit: int, *, want_last: bool, nodes: TreePart | None
    ) -> RowInput:
        """Make a row of at most `limit` of the tokens and nodes."""
        extra = len(nodes.token_ids) if nodes else 0
        if limit < len(ids) + extra:
            ids = ids[: min(limit, len(ids) - 1 if extra else len(ids))]
            want_last, nodes = False, None
        count = len(ids)
        offset = self.position - self._begin
        context = pages_module.stretches(self.entries(), self._pages.page_size)
        positions = np.arange(self.position, self.position + count, dtype=np.int32)
        cells = np.zeros(0, np.int32)
        shifts = np.zeros(0, np.int32)
        if count and self._growth:
            cells = self._growth.cells[offset : offset + count]
            shifts = self._growth.shifts[offset : offset + count]
        wanted = [count - 1] if want_last and count else []
        parents = None
        if nodes:
            ids = np.concatenate([ids, np.asarray(nodes.token_ids, np.int32)])
            positions = np.concatenate(
                [positions, self.position + count - 1 + np.asarray(nodes.depths, np.int32)]
            )
            cells = np.concatenate([cells, np.full(extra, self._num_cells)])
            shifts = np.concatenate([shifts, np.zeros(extra, np.int32)])
            parents = list(range(-1, count - 1)) + [
                count + parent if parent >= 0 else count - 1 for parent in nodes.parents
            ]
            wanted += [count + index for index in nodes.wanted]
        return RowInput(
            token_ids=ids,
            positions=positions,
            cells=cells.astype(np.int32),
            shifts=shifts,
            context=context,
            wanted=wanted,
            parents=parents,
            selects=self._selects,
        )
