"""The gate scan on TPU, through Mosaic: the output matrix is read once, logits stay on the chip.

The pipeline brings one tile of the matrix after the other into VMEM; each grid step multiplies a
block of rows by it and writes ten numbers per row, which `gate_scan_tiles.merge` merges. Floor: the
bytes of the matrix, or of the logits at hand. Besides, those numbers are 8 KiB per tile of 4 MiB
and 64 rows, padded to 128 lanes, and the allowed sets come as `_row_words`, 4 bytes per token and
32 rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxstate.kernels_pallas import gate_scan_tiles, gate_scan_xla
from jaxstate.kernels_pallas.gate_scan_tiles import NUM_IDS, NUM_VALUES
from jaxstate.kernels_pallas.gate_scan_xla import GateSummary

_LANES = 128
_TILE_BYTES = 4 * 2**20  # of the matrix at most; the pipeline keeps two, of 16 MiB
_MAX_TILE = 2048
_MAX_ROWS_BLOCK = 64
_WORD_ROWS = 32


def gate_scan_hidden(
    hidden: jax.Array,
    matrix: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> GateSummary:
    """Summarize the logits of final hidden states; see gate_scan_xla.gate_scan_hidden.

    More than 64 rows are taken block by block while the same tile of the matrix stays in VMEM.

    Args:
      interpret: run on any device, see pallas_call.
    Raises:
      NotImplementedError: hidden_size passes 16,384 in bf16 or 4,096 in f32.
    """
    num_rows, hidden_size = hidden.shape
    vocab = matrix.shape[0]
    itemsize = max(hidden.dtype.itemsize, matrix.dtype.itemsize)
    # A product in full f32 keeps pieces of the tile beside it.
    tile_elements = _TILE_BYTES // itemsize // (2 if hidden.dtype == jnp.float32 else 1)
    row_elements = pl.cdiv(hidden_size, _LANES) * _LANES
    tile = min(tile_elements // row_elements // _LANES * _LANES, _MAX_TILE)
    if tile == 0:
        raise NotImplementedError(
            f"hidden_size: expected at most {tile_elements // _LANES} in {hidden.dtype}, "
            f"got {hidden_size}; use gate_scan_xla.gate_scan_hidden"
        )
    rows_block = min(num_rows, _MAX_ROWS_BLOCK)
    hidden_axis = 0 if hidden_size % _LANES else 1
    if hidden_axis == 0:
        # Such a matrix lies transposed by default, so that lanes need no padding: taken as it
        # lies, or else XLA copies it before each call.
        matrix = matrix.T
        matrix_spec = pl.BlockSpec((hidden_size, tile), lambda tile, block: (0, tile))
    else:
        matrix_spec = pl.BlockSpec((tile, hidden_size), lambda tile, block: (tile, 0))
    return _scan(
        functools.partial(
            _hidden_kernel,
            hidden_axis=hidden_axis,
            vocab=vocab,
            scale=scale,
            softcap=softcap,
        ),
        (hidden, matrix),
        (pl.BlockSpec((rows_block, hidden_size), lambda tile, block: (block, 0)), matrix_spec),
        _row_words(allowed_bits, allowed_idx),
        vocab=vocab,
        tile=tile,
        rows_block=rows_block,
        interpret=interpret,
    )


def gate_scan(
    logits: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> GateSummary:
    """Summarize logits that are at hand; see gate_scan_xla.gate_scan. They are read once.

    Args:
      interpret: run on any device, see pallas_call.
    """
    num_rows, vocab = logits.shape
    rows_block = min(num_rows, _MAX_ROWS_BLOCK)
    return _scan(
        functools.partial(_logits_kernel, vocab=vocab, scale=scale, softcap=softcap),
        (logits,),
        (pl.BlockSpec((rows_block, _MAX_TILE), lambda tile, block: (block, tile)),),
        _row_words(allowed_bits, allowed_idx),
        vocab=vocab,
        tile=_MAX_TILE,
        rows_block=rows_block,
        interpret=interpret,
    )


def _row_words(allowed_bits, allowed_idx):
    """Turn sets into [ceil(rows / 32), 1, words * 32] int32: bit r of [w, 0, v], row 32 w + r's v.

    Vectors of TPU cannot spread a word over 32 lanes, but over rows they can.
    """
    num_rows = allowed_idx.shape[0]
    num_words = pl.cdiv(num_rows, _WORD_ROWS)
    padded = jnp.pad(allowed_bits[allowed_idx], ((0, num_words * _WORD_ROWS - num_rows), (0, 0)))
    bit = jnp.arange(32, dtype=jnp.uint32)
    spread = padded.reshape(num_words, _WORD_ROWS, -1, 1) >> bit & 1
    words = (spread << bit[:, None, None]).sum(axis=1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words.reshape(num_words, 1, -1), jnp.int32)


def _scan(kernel, operands, specs, row_words, *, vocab, tile, rows_block, interpret) -> GateSummary:
    num_rows = operands[0].shape[0]
    tiles, blocks = pl.cdiv(vocab, tile), pl.cdiv(num_rows, rows_block)
    num_words = pl.cdiv(rows_block, _WORD_ROWS)
    values, ids = pl.pallas_call(
        kernel,
        # The last dimension runs fastest: a tile is fetched once for all blocks of rows.
        grid=(tiles, blocks),
        in_specs=(
            *specs,
            pl.BlockSpec((num_words, 1, tile), lambda tile, block: (block, 0, tile)),
        ),
        out_specs=tuple(
            pl.BlockSpec((1, 1, count, rows_block), lambda tile, block: (tile, block, 0, 0))
            for count in (NUM_VALUES, NUM_IDS)
        ),
        out_shape=(
            jax.ShapeDtypeStruct((tiles, blocks, NUM_VALUES, rows_block), jnp.float32),
            jax.ShapeDtypeStruct((tiles, blocks, NUM_IDS, rows_block), jnp.int32),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="gate_scan",
    )(*operands, row_words)
    values, ids = (
        table.swapaxes(1, 2).reshape(tiles, -1, blocks * rows_block)[:, :, :num_rows]
        for table in (values, ids)
    )
    return gate_scan_tiles.merge(values, ids)


def _hidden_kernel(
    hidden_ref, matrix_ref, words_ref, values_ref, ids_ref, *, hidden_axis, vocab, scale, softcap
):
    hidden = hidden_ref[...]
    logits = jax.lax.dot_general(
        hidden, matrix_ref[...].astype(hidden.dtype), (((1,), (hidden_axis,)), ((), ())),
        precision=gate_scan_xla.precision_of(hidden.dtype), preferred_element_type=jnp.float32,
    )  # fmt: skip
    _finish(logits, words_ref, values_ref, ids_ref, vocab, scale, softcap)


def _logits_kernel(logits_ref, words_ref, values_ref, ids_ref, *, vocab, scale, softcap):
    logits = logits_ref[...].astype(jnp.float32)
    _finish(logits, words_ref, values_ref, ids_ref, vocab, scale, softcap)


def _finish(logits, words_ref, values_ref, ids_ref, vocab, scale, softcap):
    """Summarize logits [rows_block, tile] of this grid step and write what they come to."""
    rows_block, tile = logits.shape
    ids = pl.program_id(0) * tile + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # Past the vocabulary's end a block holds whatever was in VMEM.
    logits = jnp.where(ids < vocab, gate_scan_xla.cap(logits, scale, softcap), -jnp.inf)
    words = jnp.broadcast_to(words_ref[...], (words_ref.shape[0], _WORD_ROWS, tile))
    words = words.reshape(-1, tile)[:rows_block]
    rows = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    allowed = ((words >> (rows & (_WORD_ROWS - 1))) & 1) == 1
    values, found = gate_scan_tiles.summarize(logits, ids, allowed, axis=1)
    values_ref[0, 0] = _side_by_side(values).T
    ids_ref[0, 0] = _side_by_side(found).T


def _side_by_side(columns):
    """Lay columns [rows, 1] out as [rows, len(columns)]."""
    shape = (columns[0].shape[0], len(columns))
    place = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    table = jnp.broadcast_to(columns[0], shape)
    for number, column in enumerate(columns[1:], start=1):
        table = jnp.where(place == number, column, table)
    return table
