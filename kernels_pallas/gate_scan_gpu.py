"""The gate scan on GPU, through Triton: the output matrix is read once, logits stay on the chip.

Each program multiplies one tile of the vocabulary by a block of rows and writes ten numbers per
row; `gate_scan_tiles.merge` does the rest. Floor: the bytes of the matrix. What is written besides
is 40 bytes per tile of 128 tokens and row, for 64 rows 1/400 of a bf16 matrix 4,096 wide.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxstate.kernels_pallas import gate_scan_tiles, gate_scan_xla
from jaxstate.kernels_pallas.gate_scan_tiles import NUM_IDS, NUM_VALUES
from jaxstate.kernels_pallas.gate_scan_xla import GateSummary

_HIDDEN_TILE = 128  # tokens per program: the long side of a tensor-core product
_LOGITS_TILE = 2048
_CHUNK_BYTES = 128  # of one row of the matrix per turn of the loop: a whole cache line
_MAX_ROWS_BLOCK = 64
_MIN_DOT = 16  # the least side of a Triton product


def gate_scan_hidden(
    hidden: jax.Array,
    matrix: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    interpret: bool = False,
) -> GateSummary:
    """Summarize the logits of final hidden states; see gate_scan_xla.gate_scan_hidden.

    More than 64 rows are taken in blocks that run side by side, so that the matrix comes from
    memory once and for the other blocks from the second-level cache.

    Args:
      interpret: run on any device, operation by operation.
    Raises:
      NotImplementedError: hidden_size is no multiple of 16.
    """
    num_rows, hidden_size = hidden.shape
    chunk = min(hidden_size & -hidden_size, _CHUNK_BYTES // hidden.dtype.itemsize)
    if chunk < _MIN_DOT:
        raise NotImplementedError(
            f"hidden_size: expected a multiple of {_MIN_DOT}, got {hidden_size}; "
            "use gate_scan_xla.gate_scan_hidden"
        )
    rows_block = min(max(pl.next_power_of_2(num_rows), _MIN_DOT), _MAX_ROWS_BLOCK)
    return _scan(
        functools.partial(
            _hidden_kernel, rows_block=rows_block, chunk=chunk, scale=scale, softcap=softcap
        ),
        (hidden, matrix, allowed_bits, allowed_idx),
        tiles=pl.cdiv(matrix.shape[0], _HIDDEN_TILE),
        rows_block=rows_block,
        # A tile of 64 rows in f32 spills registers of four warps.
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if rows_block == _MAX_ROWS_BLOCK else 4, num_stages=4
        ),
        interpret=interpret,
    )


def gate_scan(
    logits: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    interpret: bool = False,
) -> GateSummary:
    """Summarize logits that are at hand; see gate_scan_xla.gate_scan. They are read once.

    Args:
      interpret: run on any device, operation by operation.
    """
    return _scan(
        functools.partial(_logits_kernel, scale=scale, softcap=softcap),
        (logits, allowed_bits, allowed_idx),
        tiles=pl.cdiv(logits.shape[1], _LOGITS_TILE),
        rows_block=1,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )


def _scan(kernel, operands, *, tiles, rows_block, compiler_params, interpret) -> GateSummary:
    num_rows = operands[0].shape[0]
    values, ids = pl.pallas_call(
        kernel,
        # The last dimension runs fastest: programs that read the same tile run side by side.
        grid=(tiles, pl.cdiv(num_rows, rows_block)),
        out_shape=(
            jax.ShapeDtypeStruct((tiles, NUM_VALUES, num_rows), jnp.float32),
            jax.ShapeDtypeStruct((tiles, NUM_IDS, num_rows), jnp.int32),
        ),
        compiler_params=compiler_params,
        interpret=interpret,
        name="gate_scan",
    )(*operands)
    return gate_scan_tiles.merge(values, ids)


def _hidden_kernel(
    hidden_ref, matrix_ref, bits_ref, sets_ref, values_ref, ids_ref, *, rows_block, chunk, scale,
    softcap,
):  # fmt: skip
    hidden_size = hidden_ref.shape[1]
    vocab = matrix_ref.shape[0]
    ids, rows = _slices(_HIDDEN_TILE, rows_block)
    precision = gate_scan_xla.precision_of(hidden_ref.dtype)

    def add_chunk(turn, total):
        columns = pl.ds(turn * chunk, chunk)
        part = _load(matrix_ref, ids, columns)
        mine = _load(hidden_ref, rows, columns)
        return total + jax.lax.dot_general(
            part.astype(mine.dtype), mine, (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip

    zeros = jnp.zeros((_HIDDEN_TILE, rows_block), jnp.float32)
    logits = jax.lax.fori_loop(0, hidden_size // chunk, add_chunk, zeros)
    _finish(
        logits, ids, rows, vocab, bits_ref, sets_ref, values_ref, ids_ref,
        scale=scale, softcap=softcap,
    )  # fmt: skip


def _logits_kernel(logits_ref, bits_ref, sets_ref, values_ref, ids_ref, *, scale, softcap):
    vocab = logits_ref.shape[1]
    ids, rows = _slices(_LOGITS_TILE, 1)
    logits = _load(logits_ref, rows, ids).reshape(_LOGITS_TILE, 1)
    _finish(
        logits.astype(jnp.float32), ids, rows, vocab, bits_ref, sets_ref, values_ref, ids_ref,
        scale=scale, softcap=softcap,
    )  # fmt: skip


def _slices(tile: int, rows_block: int):
    """Return which tokens and which rows are this program's."""
    return pl.ds(pl.program_id(0) * tile, tile), pl.ds(pl.program_id(1) * rows_block, rows_block)


def _numbers(part):
    return part.start + jnp.arange(part.size, dtype=jnp.int32)


def _load(ref, *parts):
    """Load a part of an array, zeros past its end."""
    shape = tuple(part.size for part in parts)
    mask = jnp.ones(shape, bool)
    for axis, (part, end) in enumerate(zip(parts, ref.shape, strict=True)):
        if end % part.size:
            others = tuple(other for other in range(len(parts)) if other != axis)
            mask &= jnp.broadcast_to(jnp.expand_dims(_numbers(part) < end, others), shape)
    return plgpu.load(ref.at[parts], mask=mask, other=0)


def _finish(logits, ids, rows, vocab, bits_ref, sets_ref, values_ref, ids_ref, *, scale, softcap):
    """Summarize logits [tile, rows_block] of this program and store what they come to."""
    shape = logits.shape
    sets = jnp.broadcast_to(_load(sets_ref, rows)[None, :], shape)
    real = _numbers(rows) < values_ref.shape[2]
    ids = jnp.broadcast_to(_numbers(ids)[:, None], shape)
    known = ids < vocab
    logits = jnp.where(known, gate_scan_xla.cap(logits, scale, softcap), -jnp.inf)
    words = plgpu.load(bits_ref.at[sets, ids >> 5], mask=known, other=0)
    allowed = ((words >> (ids & 31).astype(jnp.uint32)) & 1) == 1
    values, found = gate_scan_tiles.summarize(logits, ids, allowed, axis=0)
    tile = pl.ds(pl.program_id(0), 1)
    for ref, columns in ((values_ref, values), (ids_ref, found)):
        for place, column in enumerate(columns):
            plgpu.store(ref.at[tile, pl.ds(place, 1), rows], column[None], mask=real[None, None])
