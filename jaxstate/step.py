"""The step: the only function that runs the model on a pool."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import attention_xla, block_selector, dispatch, key_bounds
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.block_selector import BlockSelector
from jaxstate.kernels_pallas.rope import angles_at, turn
from jaxstate.models import decoder, quantized
from jaxstate.models.config import LayerConfig, ModelConfig
from jaxstate.models.params import Params
from jaxstate.models.products import Products
from jaxstate.models.rope import RopeConfig
from jaxstate.models.sharding import Sharding
from jaxstate.state import PAGE_AXES, LayerPages, Outputs, Pool, Rows, StepShape


def step(
    params: Params,
    pool: Pool,
    rows: Rows,
    allowed_bits: jax.Array,
    *,
    config: ModelConfig,
    shape: StepShape,
    implementation: str,
    sharding: Sharding | None = None,
    logits: bool = True,
    selector: BlockSelector | None = None,
) -> tuple[Pool, Outputs]:
    """Run the model over the rows' tokens; the caller donates the pool and rebinds it at once.

    A token sees the cells of its row's work items, as they were before the step, and the step's
    own tokens through the tail mask; both by position (see WorkList, Rows).

    Args:
      params: tree of `param_specs(config)`.
      pool: pages of every layer; donated.
      rows: see Rows.
      allowed_bits: [sets, ceil(vocab / 32)] uint32 packed allowed sets.
      implementation: of the kernels, from `dispatch.choose`.
      sharding: how params and pool lie over several devices; rows and outputs are on all of them.
      logits: whether they are computed; else summaries come from one pass over the output matrix,
        which must not be quantized nor split over devices.
      selector: chooses which blocks of the context the tokens of Rows.selects read; the pool then
        has bounds.
    Returns:
      pool: with the new tokens' keys and values written.  outputs: see Outputs.
    """
    tokens = shape.num_tokens
    chex.assert_shape(
        [rows.token_ids, rows.positions, rows.token_rows, rows.write_cells, rows.write_shifts],
        (tokens,),
    )
    chex.assert_type(
        [rows.token_ids, rows.positions, rows.token_rows, rows.write_cells, rows.write_shifts],
        jnp.int32,
    )
    chex.assert_shape(rows.tail_mask, (tokens, tokens))
    chex.assert_type(rows.tail_mask, bool)
    chex.assert_shape(rows.selects, (tokens,))
    chex.assert_equal_shape([pages for layer in pool for pages in (layer.k_pages, layer.v_pages)])
    chex.assert_shape([rows.output_tokens, rows.allowed_idx], (shape.num_rows,))
    tails = {
        layer.window: attention_xla.tail_visible(rows.positions, rows.tail_mask, layer.window)
        for layer in config.layers
    }
    ropes = {layer.rope: _rope_tables(layer.rope, config, rows) for layer in config.layers}

    def mix(layer: LayerConfig, selects, q, k, v, pages: LayerPages, rows: Rows, tail, tables):
        q = turn(q, tables["tokens"][:, None])
        k = turn(k, tables["tokens"][:, None])
        stored = turn(k, tables["write_shifts"].reversed[:, None])
        # Write before any read: XLA then updates the donated pages in place. The context part
        # sees only cells that existed before the step, so the order does not show.
        k_pages, v_pages = dispatch.kv_write(
            implementation, pages.k_pages, pages.v_pages, stored, v, rows.write_cells
        )
        bounds, selection = pages.bounds, None
        if bounds is not None:
            bounds = key_bounds.write(bounds, k_pages, rows.write_cells)
        if selects:
            assert selector is not None and bounds is not None
            selection = block_selector.select(
                selector, q, jax.tree.map(lambda bound: own(bound, 0), bounds), rows.positions,
                rows.token_rows, rows.selects, rows.work, tables["work"],
            )  # fmt: skip
        pages = LayerPages(k_pages=k_pages, v_pages=v_pages, bounds=bounds)
        mixed = dispatch.attend(
            implementation, q, own(k, 1), own(v, 1), rows.positions, rows.token_rows, tail,
            own(pages.k_pages, 0), own(pages.v_pages, 0), rows.work, tables["work"],
            block_tokens=shape.block_tokens, window=layer.window,
            precision=config.dtypes.precision, selection=selection,
        )  # fmt: skip
        return mixed.astype(config.dtypes.compute_dtype), pages

    def own(x, dimension):
        return x if sharding is None else sharding.own_kv_heads(x, dimension)

    def attend(layer_idx, q, k, v, pages: LayerPages):
        layer = config.layers[layer_idx]
        selects = (
            selector is not None and layer.window is None and layer_idx >= selector.dense_layers
        )
        function = functools.partial(mix, layer, selects)
        if sharding is not None:
            function = _on_every_device(function, sharding)
        return function(q, k, v, pages, rows, tails[layer.window], ropes[layer.rope])

    products = _products(implementation, sharding)
    hidden, pool = decoder.forward(params, config, rows.token_ids, attend, pool, products)
    if not logits:
        matrix = decoder.output_matrix(params, config)
        return pool, _scanned(implementation, hidden, matrix, rows, allowed_bits)
    # Several devices have no kernel: XLA divides the scan among them as it divides the matrix.
    scan = functools.partial(dispatch.gate_scan, "xla" if sharding else implementation)
    return pool, _projected(params, config, hidden, rows, products, scan, allowed_bits)


def _products(implementation: str, sharding: Sharding | None) -> Products:
    """Kernels for products; XLA divides only its own products of floats among devices."""
    return Products(
        quantized=dispatch.product(implementation) or quantized.plain_product,
        few_rows=None if sharding else dispatch.few_rows(implementation),
    )


def _on_every_device(mix, sharding: Sharding):
    """Run attention and cache writes per device, on its own heads: kernels see plain arrays."""
    of_q = sharding.spec(None, "heads", None)
    of_kv = sharding.spec(None, "kv_heads", None)
    of_pages = sharding.spec(*PAGE_AXES)
    return jax.shard_map(
        mix,
        mesh=sharding.mesh,
        in_specs=(of_q, of_kv, of_kv, of_pages, sharding.spec(), sharding.spec(), sharding.spec()),
        out_specs=(of_q, of_pages),
        check_vma=False,
    )


def _rope_tables(rope: RopeConfig, config: ModelConfig, rows: Rows) -> dict:
    """Angles shared by all layers with this rope."""
    frequencies = jnp.asarray(rope.inverse_frequencies(config.head_dim))
    return {
        "tokens": angles_at(rows.positions, frequencies),
        "write_shifts": angles_at(rows.write_shifts, frequencies),
        "work": tuple(
            angles_at(work.items[:, work_columns.SHIFT], frequencies) for work in rows.work
        ),
    }


def _scanned(implementation: str, hidden, matrix, rows: Rows, allowed_bits) -> Outputs:
    """Summaries of the wanted rows without their logits; no pass when none is wanted."""
    wanted = hidden[rows.output_tokens]  # [rows, hidden_size]
    scan = functools.partial(dispatch.gate_scan_hidden, implementation)
    operands = wanted, matrix, allowed_bits, rows.allowed_idx
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(scan, *operands))
    summary = jax.lax.cond(rows.num_outputs > 0, scan, lambda *_: nothing, *operands)
    return Outputs(summary=summary, hidden=wanted)


def _projected(
    params, config: ModelConfig, hidden, rows: Rows, products: Products, scan, allowed_bits
) -> Outputs:
    """Logits of the wanted rows and their summaries; no vocabulary work when none is wanted."""
    wanted = hidden[rows.output_tokens]  # [rows, hidden_size]
    num_rows = wanted.shape[0]

    def some(count: int) -> Outputs:
        logits = decoder.logits(params, config, wanted[:count], products)
        return Outputs(
            summary=scan(logits, allowed_bits, rows.allowed_idx[:count]), logits=logits
        )

    def padded(count: int) -> Outputs:
        return jax.tree.map(
            lambda x: jnp.zeros((num_rows, *x.shape[1:]), x.dtype).at[:count].set(x), some(count)
        )

    def none() -> Outputs:
        shapes = jax.eval_shape(functools.partial(some, num_rows))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # One row reads the output matrix at memory speed, which a padded product does not; and of
    # eight rows, scanning those that nobody wants takes longer than reading the matrix.
    branches = [none, functools.partial(padded, 1)]
    if num_rows > 1:
        branches.append(functools.partial(some, num_rows))
    return jax.lax.switch(jnp.minimum(rows.num_outputs, len(branches) - 1), branches)
