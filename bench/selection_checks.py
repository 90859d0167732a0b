"""What the block selector keeps of a long context, and what its answers lose by the rest.

Two real contexts of about 7,000 tokens, candles and mixed texts, on a real model. At positions all
over the later half one token is forwarded as in decoding, by the step that sessions use: with every
block, with the blocks of a selector, and with as many blocks chosen otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import quantized_texts
from common import Report

from jaxstate import rows as rows_module
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.kernels_pallas import block_selector
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.block_selector import BlockSelector
from jaxstate.kernels_pallas.key_bounds import KeyBounds
from jaxstate.kernels_pallas.rope import Angles, angles_at, turn
from jaxstate.kernels_pallas.selection import BLOCK_CELLS
from jaxstate.models import decoder, loading
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.pages import Stretch
from jaxstate.rows import Group, RowInput
from jaxstate.serving import market
from jaxstate.state import LayerPages, Pool, StepShape
from jaxstate.step import step

CONTEXT = 7168  # tokens
PAGE_SIZE = 64
POSITIONS = 48
KEPT = (0.05, 0.10, 0.25)
ONE = StepShape(num_tokens=1, block_tokens=1, num_rows=1)
SMALL = BlockSelector(kept=1.0, sink_tokens=16, recent_tokens=64)
"""Less is kept always, so that 5 % of 7,000 tokens leave something to choose."""


def quality(path: pathlib.Path, report: Report, *, quick: bool) -> list[dict[str, Any]]:
    """Measure both contexts; one line per context and selector."""
    model = loading.load(path)
    arms = [arm for arm in _arms() if not quick or arm[1].kept == 0.10]
    selectors = [selector for _, selector in arms]
    steps = [_step(model, selector) for selector in (None, *selectors)]
    measure_masses = _masses(model, selectors)
    lines = []
    for name, ids in list(_contexts(model).items())[: 1 if quick else None]:
        common.note(f"selection on {name}, {len(ids)} tokens")
        pool, config = _pool(model, ids)
        positions = np.linspace(CONTEXT // 2, len(ids) - 1, 8 if quick else POSITIONS).astype(int)
        rows = [_row(ids, position, config) for position in positions.tolist()]
        exact = _logprobs(steps[0], model, pool, rows)
        masses = [jax.device_get(measure_masses(model.params, pool, row)) for row in rows]
        for index, (choice, selector) in enumerate(arms):
            found = _logprobs(steps[index + 1], model, pool, rows)
            divergences = (np.exp(exact) * (exact - found)).sum(axis=-1)
            # [positions, layers that select, 2]
            parts = np.asarray([one[selector.dense_layers :] for one in masses])[..., index]
            lines.append({
                "arm": "selection", "context": name, "choice": choice, "kept": selector.kept,
                "sink_tokens": selector.sink_tokens, "recent_tokens": selector.recent_tokens,
                "dense_layers": selector.dense_layers, "positions": len(rows),
                "read": float(parts[:, :, 1].mean()), "recall": float(parts[:, :, 0].mean()),
                "recall_worst_layer": float(parts[:, :, 0].mean(axis=0).min()),
                "kl_nats": float(divergences.mean()),
                "kl_p90_nats": float(np.percentile(divergences, 90)),
                "same_top1": float((exact.argmax(-1) == found.argmax(-1)).mean()),
            })  # fmt: skip
            report.line(**lines[-1])
    return lines


def _arms() -> list[tuple[str, BlockSelector]]:
    """Selectors as they come, with less that is always kept, and such that choose by age alone."""
    arms = [("bounds", BlockSelector(kept=kept)) for kept in KEPT]
    for kept in KEPT:
        small = dataclasses.replace(SMALL, kept=kept)
        newest = int(kept * CONTEXT) - SMALL.sink_tokens
        arms.append(("bounds", small))
        arms.append(("newest", dataclasses.replace(small, recent_tokens=newest)))
    return arms


def table(lines: list[dict[str, Any]]) -> None:
    """Print the lines for people to stderr."""
    columns = (
        "context", "choice", "kept", "sink_tokens", "recent_tokens", "read", "recall",
        "recall_worst_layer", "kl_nats", "kl_p90_nats", "same_top1",
    )  # fmt: skip
    common.note("\n" + "".join(f"{column:>20}" for column in columns))
    for line in lines:
        cells = (line[column] for column in columns)
        texts = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
        common.note("".join(f"{text:>20}" for text in texts))


def _contexts(model: LoadedModel) -> dict[str, list[int]]:
    assert model.tokenizer is not None
    texts = quantized_texts.texts()
    mixed: list[int] = []
    while len(mixed) < CONTEXT:  # the second time round they are known, as documents often are
        mixed += model.tokenizer.encode("\n\n".join(texts) + "\n\n")
    candles = market.SYSTEM + "".join(candle.text for candle in market.candles())
    return {
        "candles": model.tokenizer.encode(candles)[:CONTEXT], "texts": mixed[:CONTEXT]
    }  # fmt: skip


def _pool(model: LoadedModel, ids: list[int]) -> tuple[Pool, EngineConfig]:
    """Keys and values of a context as an engine computes them, with bounds, cells in order."""
    sizes = EngineConfig(
        num_pages=-(-CONTEXT // PAGE_SIZE) + 2, page_size=PAGE_SIZE, context_len=CONTEXT,
        evict_quantum=PAGE_SIZE,
        step_shapes=(StepShape(num_tokens=512, block_tokens=512, num_rows=1),),
    )  # fmt: skip
    engine = Engine(model.params, model.config, sizes)
    engine.append(engine.create(), ids)
    cells = np.arange(sizes.num_cells)
    layers = []
    for keys, values in engine.executor.read_cells(cells):
        blocks = keys.reshape(keys.shape[0], -1, BLOCK_CELLS, keys.shape[-1])
        shape = (keys.shape[0], sizes.num_pages, PAGE_SIZE, keys.shape[-1])
        bounds = KeyBounds(low=jnp.asarray(blocks.min(2)), high=jnp.asarray(blocks.max(2)))
        layers.append(
            LayerPages(
                k_pages=jnp.asarray(keys.reshape(shape)),
                v_pages=jnp.asarray(values.reshape(shape)),
                bounds=bounds,
            )
        )
    stretches = (sizes.num_cells,)
    return tuple(layers), dataclasses.replace(sizes, stretch_cells=stretches, table_capacity=1)


def _row(ids: list[int], position: int, config: EngineConfig):
    """Forward one token of the context again, behind all that precede it, and write nothing."""
    row = RowInput(
        token_ids=np.asarray([ids[position]], np.int32),
        positions=np.asarray([position], np.int32),
        cells=np.asarray([config.num_cells], np.int32), shifts=np.zeros(1, np.int32),
        context=[Stretch(0, position, 0, 0)], wanted=[0], selects=True,
    )  # fmt: skip
    return rows_module.pack([Group(rows=[row])], ONE, config)


def _step(model: LoadedModel, selector: BlockSelector | None):
    function = functools.partial(
        step, config=model.config, shape=ONE, implementation="xla", selector=selector
    )
    return jax.jit(function)  # the pool is not donated: every arm starts from the same


def _logprobs(compiled, model: LoadedModel, pool: Pool, rows) -> np.ndarray:
    """Return natural log-probabilities after each row's token: [rows, vocab] in float64."""
    everything = np.full((1, -(-model.config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    found = []
    for row in rows:
        _, outputs = compiled(model.params, pool, row, everything)
        found.append(np.asarray(outputs.logits[0], np.float64) - float(outputs.summary.lse[0]))
    return np.stack(found)


def _masses(model: LoadedModel, selectors: list[BlockSelector]):
    """What attention gives to the blocks that each selector would choose.

    Taken along the exact forward, so that a layer's figure is its own. The function returned gives,
    per layer, [2, selectors]: the share of attention's mass on the context (mean over heads), and
    the share of the context's blocks (mean over key/value heads).
    """
    config = model.config

    def attend(row, layer_idx, q, k, v, pages: LayerPages):
        frequencies = config.layers[layer_idx].rope.inverse_frequencies(config.head_dim)
        angles = angles_at(row.positions, jnp.asarray(frequencies))[:, None]
        q, k = turn(q, angles), turn(k, angles)
        kv_heads, head_dim = k.shape[1:]
        fill = row.work[0].items[0, work_columns.FILL]
        keys, values = (
            pages.reshape(kv_heads, -1, head_dim) for pages in (pages.k_pages, pages.v_pages)
        )
        of_heads = q[0].reshape(kv_heads, -1, head_dim)
        scores = jnp.einsum("GQD,GKD->GQK", of_heads, keys, precision="highest")
        own = jnp.einsum("GQD,GD->GQ", of_heads, k[0], precision="highest")[..., None]
        seen = jnp.arange(keys.shape[1]) < fill
        scores = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), own], axis=-1)
        weights = jax.nn.softmax(scores / np.sqrt(head_dim), axis=-1)
        mixed = jnp.einsum("GQK,GKD->GQD", weights[..., :-1], values, precision="highest")
        mixed += weights[..., -1:] * v[0][:, None]
        still = Angles(cos=jnp.ones((1, head_dim // 2)), sin=jnp.zeros((1, head_dim // 2)))
        assert pages.bounds is not None
        found = []
        for selector in selectors:
            selection = block_selector.select(
                selector, q, pages.bounds, row.positions, row.token_rows, row.selects, row.work,
                [still],
            )  # fmt: skip
            chosen = jnp.repeat(selection.mask(keys.shape[1] // BLOCK_CELLS), BLOCK_CELLS, axis=1)
            on_chosen = jnp.where(chosen[:, None], weights[..., :-1], 0).sum(axis=-1)
            mass = (on_chosen / weights[..., :-1].sum(axis=-1)).mean()
            found.append(jnp.stack([mass, selection.count.mean() * BLOCK_CELLS / fill]))
        return mixed.reshape(1, -1, head_dim), jnp.stack(found, axis=-1)

    def measure(params, pool, row):
        product = functools.partial(attend, row)
        return decoder.forward(params, config, row.token_ids, product, pool)[1]

    return jax.jit(measure)
