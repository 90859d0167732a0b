"""Steps of several rows of several sessions, past the engine's verbs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxstate import pages as pages_module
from jaxstate.engine import Engine
from jaxstate.errors import PoolFullError
from jaxstate.pages import Entry
from jaxstate.rows import Group, RowInput
from oracle.equality import Rule, log_softmax
from oracle.history import Context, History
from oracle.mirror import Mirror, common_len

Table = tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpec:
    """One row.

    Attributes:
      session_id: whose context it sees.
      token_ids: its new tokens.
      position: where the first one stands; None = behind the context.
      parents: as in RowInput.
    """

    session_id: str
    token_ids: Sequence[int]
    position: int | None = None
    parents: Sequence[int] | None = None

    @property
    def is_sequence(self) -> bool:
        """Plain tokens behind the context, which could be kept."""
        return self.position is None and self.parents is None


@dataclasses.dataclass(frozen=True)
class RowOutput:
    """What a step says of the distribution after a row's last token."""

    logits: np.ndarray
    top_id: int
    lse: float
    entropy: float


class Together:
    """Rows that run in one step and, where they are kept, one token more in a second one."""

    def __init__(self, engine: Engine, specs: Sequence[RowSpec], *, one_group: bool, write: bool):
        """Prepare rows; at most as many as a step has outputs, and few enough tokens.

        Args:
          one_group: all rows share what their tables have in common and see the rest privately;
            otherwise rows that see the same table are a group.
          write: sequences are written to pages of their own and continued in a second step.
        """
        self._engine = engine
        self._specs = specs
        self._one_group = one_group
        self._tables: list[Table] = [engine.session(spec.session_id).entries for spec in specs]
        self._lengths = [engine.session(spec.session_id).context_len for spec in specs]
        self._kept = [index for index, spec in enumerate(specs) if write and spec.is_sequence]
        self._held: list[Table] = []
        self.outputs: list[RowOutput] = []
        self.later_outputs: list[RowOutput] = []

    def run(self) -> bool:
        """Run both steps; the caller gives back afterwards, whatever happened."""
        for spec in self._specs:
            self._engine.session(spec.session_id).running += 1
        try:
            return self._run()
        finally:
            for spec in self._specs:
                self._engine.session(spec.session_id).running -= 1

    def _run(self) -> bool:
        nowhere = self._engine.config.num_cells
        rows = []
        grown = list(self._tables)
        self._check_room()
        for index, spec in enumerate(self._specs):
            count = len(spec.token_ids)
            cells = np.full(count, nowhere, np.int32)
            shifts = self._shifts(index)
            if index in self._kept:
                growth = pages_module.plan_growth(
                    self._engine.pages, object(), self._tables[index], self._lengths[index],
                    shifts, growing=False,
                )  # fmt: skip
                self._engine.pages.hold(growth.entries)
                self._held.append(growth.entries)
                cells, grown[index] = growth.cells, growth.entries
            rows.append(_row(spec, self._lengths[index], cells, shifts))
        self.outputs = self._step(rows, self._tables)
        if self._kept:
            later = [
                _row(
                    RowSpec(session_id="", token_ids=[index + 1]),
                    self._lengths[index] + len(self._specs[index].token_ids),
                    np.full(1, nowhere, np.int32), np.zeros(1, np.int32),
                )
                for index in self._kept
            ]  # fmt: skip
            self.later_outputs = self._step(later, [grown[index] for index in self._kept])
        return True

    def _check_room(self) -> None:
        """Refuse where not all can grow: growth of one may cost paid tails, which would be gone."""
        pages = self._engine.pages
        needed = sum(
            pages_module.pages_needed(
                pages, object(), self._tables[index], self._lengths[index], self._shifts(index)
            )
            for index in self._kept
        )
        if needed > pages.num_available:
            raise PoolFullError(f"needs {needed} pages, {pages.num_available} can be had")

    def _shifts(self, index: int) -> np.ndarray:
        count = len(self._specs[index].token_ids)
        return np.full(count, self._lengths[index] // 2, np.int32)

    def give_back(self) -> None:
        """Release the pages that were written."""
        for entries in self._held:
            self._engine.pages.drop(entries)

    def check(self, history: History, rule: Rule, mirrors: dict[str, Mirror]) -> None:
        """Compare the outputs with the reference."""
        records: list[Context] = []
        for spec, output in zip(self._specs, self.outputs, strict=True):
            context = mirrors[spec.session_id].context
            records.append(
                history.extend(
                    context, spec.token_ids, position=spec.position, parents=spec.parents
                )
            )
            _compare(output, history.logits(records[-1][-1]), rule, "step")
        for index, output in zip(self._kept, self.later_outputs, strict=True):
            context = mirrors[self._specs[index].session_id].context + records[index]
            last = history.extend(context, [index + 1])[-1]
            _compare(output, history.logits(last), rule, "second step")

    def _step(self, rows: list[RowInput], tables: list[Table]) -> list[RowOutput]:
        size = self._engine.pages.page_size
        members: dict[Any, list[int]] = {}
        for index, table in enumerate(tables):
            members.setdefault(None if self._one_group else table, []).append(index)
        groups, order = [], []
        for indices in members.values():
            common = _common_entries([tables[index] for index in indices])
            groups.append(
                Group(
                    rows=[
                        dataclasses.replace(
                            rows[index],
                            context=pages_module.stretches(tables[index][len(common) :], size),
                        )
                        for index in indices
                    ],
                    context=pages_module.stretches(common, size),
                )
            )
            order += indices
        result = self._engine.executor.run(groups)
        summary = result.summary
        outputs = {
            index: RowOutput(
                logits=np.asarray(result.row_logits(at)),
                top_id=int(summary.top_ids[at, 0]),
                lse=float(summary.lse[at]),
                entropy=float(summary.entropy[at]),
            )
            for at, index in enumerate(order)
        }
        return [outputs[index] for index in range(len(rows))]


def _common_entries(tables: list[Table]) -> Table:
    """Return the longest table that all of them begin with."""
    common = tables[0]
    for table in tables[1:]:
        common = common[: common_len(common, table)]
    return common


def _row(spec: RowSpec, length: int, cells: np.ndarray, shifts: np.ndarray) -> RowInput:
    depths = np.zeros(len(spec.token_ids), np.int32)
    for index, parent in enumerate(spec.parents or range(-1, len(depths) - 1)):
        depths[index] = depths[parent] + 1 if parent >= 0 else 0
    begin = length if spec.position is None else spec.position
    return RowInput(
        token_ids=np.asarray(spec.token_ids, np.int32),
        positions=(begin + depths).astype(np.int32),
        cells=cells,
        shifts=shifts,
        wanted=[len(depths) - 1],
        parents=spec.parents,
    )


def _compare(output: RowOutput, want: np.ndarray, rule: Rule, what: str) -> None:
    rule.logits(output.logits, want, what)
    rule.greedy_token(output.top_id, want, what)
    logprobs = log_softmax(want)
    allowed = rule.tolerance(want)
    rule.close(output.lse, want[0] - logprobs[0], allowed, f"{what}: log-sum-exp")
    # d entropy / d logit is p (log p + entropy): at most the spread of the logprobs in all.
    spread = float(np.abs(logprobs).max())
    rule.close(
        output.entropy,
        -(np.exp(logprobs) * logprobs).sum(),
        2 * allowed * (1 + spread),
        f"{what}: entropy",
    )
