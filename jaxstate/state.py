"""The pytrees of a step: the pool of pages, the rows that go in, the outputs that come out."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas.gate_scan_xla import GateSummary
from jaxstate.kernels_pallas.key_bounds import KeyBounds
from jaxstate.kernels_pallas.selection import num_blocks
from jaxstate.kernels_pallas.work import WorkList
from jaxstate.models.config import ModelConfig
from jaxstate.models.sharding import Sharding


@flax.struct.dataclass
class LayerPages:
    """Paged keys and values of one layer. Pages of a session need not be adjacent.

    The head axis comes first, so that neighbouring pages of one head are one contiguous stretch:
    the plain-XLA attention reads many pages with one slice, a kernel reads one page and head as
    one transfer.
    """

    k_pages: jax.Array  # [num_kv_heads, num_pages, page_size, head_dim]
    v_pages: jax.Array  # [num_kv_heads, num_pages, page_size, head_dim]
    bounds: KeyBounds | None = None  # of k_pages, where a selector reads them


Pool = tuple[LayerPages, ...]

PAGE_AXES = ("kv_heads",)
"""Logical axes of pages and bounds, see models.sharding; the others are never split."""


def init_pool(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    sharding: Sharding | None = None,
    *,
    bounds: bool = False,
) -> Pool:
    """Allocate an empty pool; every buffer separately, since every step donates them all.

    Args:
      bounds: whether KeyBounds are kept, which a BlockSelector needs.
    """
    place = None if sharding is None else sharding.named(*PAGE_AXES)

    def zeros(*shape):
        whole = (config.num_kv_heads, *shape, config.head_dim)
        return jnp.zeros(whole, config.dtypes.cache_dtype, device=place)

    def layer() -> LayerPages:
        blocks = num_blocks(num_pages * page_size)
        return LayerPages(
            k_pages=zeros(num_pages, page_size),
            v_pages=zeros(num_pages, page_size),
            bounds=KeyBounds(low=zeros(blocks), high=zeros(blocks)) if bounds else None,
        )

    return tuple(layer() for _ in range(config.num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static sizes of one compiled step.

    Attributes:
      num_tokens: tokens of the step, padding included.
      block_tokens: query tokens that share one pass over the context; divides num_tokens.
      num_rows: rows whose outputs can be asked for.
    """

    num_tokens: int
    block_tokens: int
    num_rows: int

    def __post_init__(self):
        """Check that blocks tile the step."""
        if self.num_tokens % self.block_tokens:
            raise ValueError(
                f"block_tokens: expected a divisor of num_tokens={self.num_tokens}, "
                f"got {self.block_tokens}"
            )


@flax.struct.dataclass
class Rows:
    """One step's input: flat over tokens, with tables per row.

    Attributes:
      token_ids: [tokens] int32.
      positions: [tokens] int32, where each token stands in its row's context.
      token_rows: [tokens] int32, the row of each token; work.PADDING_ROW = padding.
      selects: [tokens] bool, whether a selector may leave out blocks that a token sees.
      write_cells: [tokens] int32, page * page_size + cell; at or past the pool's end = drop.
      write_shifts: [tokens] int32; the stored key is rotated at position - shift.
      tail_mask: [tokens, tokens] bool, which of the step's tokens a token may see.
      work: what of the pool each row sees, one list per stretch length.
      output_tokens: [rows] int32, the token after which a row's distribution is wanted.
      num_outputs: [] int32, rows that want outputs; they come first.
      allowed_idx: [rows] int32, each row's allowed set.
    """

    token_ids: jax.Array
    positions: jax.Array
    token_rows: jax.Array
    selects: jax.Array
    write_cells: jax.Array
    write_shifts: jax.Array
    tail_mask: jax.Array
    work: tuple[WorkList, ...]
    output_tokens: jax.Array
    num_outputs: jax.Array
    allowed_idx: jax.Array


@flax.struct.dataclass
class Outputs:
    """What a step returns for its rows; rows past Rows.num_outputs hold nothing of meaning.

    Attributes:
      summary: of each row's next-token distribution.
      logits: [rows, vocab] f32; None where the step was to do without.
      hidden: [rows, hidden_size], final hidden states to compute them from; else None.
    """

    summary: GateSummary
    logits: jax.Array | None = None
    hidden: jax.Array | None = None
