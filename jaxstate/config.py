"""Sizes and shapes of an engine, fixed when it starts."""

from __future__ import annotations

import dataclasses

from jaxstate.kernels_pallas.block_selector import BlockSelector
from jaxstate.kernels_pallas.dispatch import Implementation
from jaxstate.kernels_pallas.selection import BLOCK_CELLS
from jaxstate.models.config import ModelConfig
from jaxstate.state import StepShape

DEFAULT_STEP_SHAPES = tuple(
    StepShape(num_tokens=tokens, block_tokens=block, num_rows=1 if tokens == 1 else 8)
    for tokens, block in (
        (1, 1), (4, 4), (8, 8), (8, 1), (12, 12), (16, 16), (20, 20), (24, 24), (32, 32), (48, 48),
        (64, 64), (64, 16), (128, 128), (256, 256), (512, 512),
    )
)  # fmt: skip
"""One executable each. Questions are short and padding is paid in full, hence the fine steps. Rows
of many sessions go in blocks of their own, which do not visit each other's contexts: one token each
in (8, 1), short questions and appends in (64, 16)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
      num_pages: pages of the pool; cells = num_pages * page_size.
      page_size: cells of a page.
      context_len: most tokens a session keeps (frozen prefix and stream), in tokens. What the
        model's longest position leaves beyond it is room for questions and answers.
      evict_quantum: a sliding session drops its oldest tokens in multiples of this.
      step_shapes: the static sizes that are compiled, smallest first.
      stretch_cells: lengths of the pool stretches that attention reads, longest first; None =
        what the implementation reads best.
      table_capacity: most stretches of one length that one step may read; None = enough for a
        context that fills the pool, however scattered.
      implementation: of the attention, see kernels_pallas.dispatch; "auto" logs its choice.
      selector: chooses what of a context questions read, which makes answers approximate; None =
        everything. What becomes durable is always computed from everything.
      prefix_share: share of the pool's pages in which beginnings of contexts are kept that nobody
        uses any more; 0 = new contexts share those of open ones only; None = contexts share nothing
        but what forks do.
      host_bytes: of sessions' cells that may wait in host memory while nobody asks for them, and
        of copies that are left there of those that came back.
      swap_dir: directory for those that host memory has no room for; None = they stay.
      kernel_cache_dir: where compiled kernels are kept; None = the user's cache folder.
    """

    num_pages: int
    page_size: int
    context_len: int
    evict_quantum: int
    step_shapes: tuple[StepShape, ...] = DEFAULT_STEP_SHAPES
    stretch_cells: tuple[int, ...] | None = None
    table_capacity: int | None = None
    implementation: Implementation = "auto"
    selector: BlockSelector | None = None
    prefix_share: float | None = None
    host_bytes: int = 0
    swap_dir: str | None = None
    kernel_cache_dir: str | None = None

    def __post_init__(self):
        """Check that sizes make sense on their own."""
        for name in ("num_pages", "page_size", "context_len", "evict_quantum", "table_capacity"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.host_bytes < 0:
            raise ValueError(f"host_bytes: expected at least 0, got {self.host_bytes}")
        if self.prefix_share is not None and not 0 <= self.prefix_share <= 1:
            raise ValueError(f"prefix_share: expected 0 to 1 or None, got {self.prefix_share}")
        if not self.step_shapes:
            raise ValueError("step_shapes: expected at least one shape, got none")
        sizes = [shape.num_tokens for shape in self.step_shapes]
        if sizes != sorted(sizes):
            raise ValueError(f"step_shapes: expected ascending num_tokens, got {sizes}")
        if self.selector is not None and self.page_size % BLOCK_CELLS:
            raise ValueError(
                f"page_size: expected a multiple of {BLOCK_CELLS} with a selector, "
                f"got {self.page_size}"
            )
        if self.stretch_cells is None:
            return
        if not self.stretch_cells or min(self.stretch_cells) < 1:
            raise ValueError(
                f"stretch_cells: expected lengths of at least one cell, got {self.stretch_cells}"
            )
        if list(self.stretch_cells) != sorted(set(self.stretch_cells), reverse=True):
            raise ValueError(
                f"stretch_cells: expected descending lengths, got {self.stretch_cells}"
            )
        if self.stretch_cells[0] > self.num_cells:
            raise ValueError(
                f"stretch_cells: expected at most the pool's {self.num_cells} cells, "
                f"got {self.stretch_cells[0]}"
            )

    @property
    def num_cells(self) -> int:
        """Cells of the pool."""
        return self.num_pages * self.page_size

    @property
    def table_len(self) -> int:
        """Rows of a step's table of stretches, per stretch length."""
        if self.table_capacity is not None:
            return self.table_capacity
        shortest = self.stretch_cells[-1] if self.stretch_cells else self.num_cells
        return (self.num_pages + 1) * -(-self.page_size // shortest)

    def check_model(self, model: ModelConfig) -> None:
        """Check that sessions fit the model's positions.

        Raises:
          ValueError: context_len leaves no position for a question.
        """
        if self.context_len >= model.max_positions:
            raise ValueError(
                f"context_len: expected less than the model's {model.max_positions} positions "
                f"(questions need some), got {self.context_len}"
            )
