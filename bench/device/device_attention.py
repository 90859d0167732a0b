"""How long attention takes: decode over contexts of its own, rows that share one, a prefill."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import device_problem
import jax
import numpy as np
from device_problem import Layout
from device_report import Bar
from device_run import Run
from device_sizes import Heads, Sizes
from device_timing import measure, noise, require_bytes

from jaxstate.rows import Group
from jaxstate.state import StepShape

_PAGE_SIZE = 64
_MOST_LAYERS = 16
_MOST_XLA_LAYERS = 4  # its loops take long to compile
MOST_XLA_CELLS = 64 * 8192
"""Plain XLA visits stretches of 1,024 cells one after another: more of them take seconds."""


def decode(run: Run, name: str, rows: int, context: int) -> None:
    """Time rows of one token, each behind a context of its own: "kernel" or "xla"."""
    shape = StepShape(num_tokens=rows, block_tokens=1, num_rows=1)
    groups = device_problem.apart(rows, context)
    _timing(
        run, name, decode_name(name, rows, context), groups, shape, cells=rows * context,
        pairs=rows * context, rows=rows, context=context,
    )  # fmt: skip


def group(run: Run, name: str, rows: int, context: int) -> None:
    """Time rows of one token that share one context, as one group."""
    shape = StepShape(num_tokens=rows, block_tokens=rows, num_rows=1)
    groups = device_problem.together(rows, context)
    _timing(
        run, name, _group_name(name, rows), groups, shape, cells=context, pairs=rows * context,
        rows=rows, context=context,
    )  # fmt: skip


def ungrouped(run: Run, rows: int, context: int) -> None:
    """Time rows of one token that read the same context each for itself."""
    shape = StepShape(num_tokens=rows, block_tokens=1, num_rows=1)
    groups = device_problem.together(1, context) * rows
    _timing(
        run, "kernel", f"one context, apart kernel {rows}", groups, shape, cells=context,
        pairs=rows * context, rows=rows, context=context,
    )  # fmt: skip


def prefill(run: Run, name: str, tokens: int, context: int) -> None:
    """Time the chunk of tokens that follows a context."""
    shape = StepShape(num_tokens=tokens, block_tokens=tokens, num_rows=1)
    seen = [device_problem.stretch(0, context)]
    groups = [Group(rows=[device_problem.row(context, tokens, seen)])]
    _timing(
        run, name, f"prefill {name} {tokens} behind {context}", groups, shape, cells=context,
        pairs=tokens * (context + tokens / 2), rows=1, tokens=tokens, context=context,
    )  # fmt: skip


def _timing(
    run: Run, name: str, key: str, groups: Sequence[Group], shape: StepShape, *, cells: int,
    pairs: float, **detail: Any,
) -> None:  # fmt: skip
    """Time one layer of several, each with a pool of its own.

    Args:
      cells: of the pool, all of which are read.
      pairs: of a token and a cell that it sees.
    """
    heads = run.sizes.real
    num_bytes = cells * heads.bytes_per_cell
    layers = _num_layers(run.sizes, num_bytes, name)
    if name == "xla" and cells > MOST_XLA_CELLS:
        raise NotImplementedError(f"plain XLA is timed up to {MOST_XLA_CELLS} cells")
    implementation = run.implementation(name)
    layout = layout_of(heads, groups, shape, cells)
    run.require(name, heads.head_dim, layout.dtype)
    require_bytes(layers * num_bytes, f"{key}: keys and values")
    pools = [
        (layout.pages(2 * layer), layout.pages(2 * layer + 1)) for layer in range(1, layers + 1)
    ]
    args = (layout.tokens(100), pools, layout.pack(groups, implementation))
    attend = functools.partial(device_problem.attention, implementation, layout)
    compiled = device_problem.lower(attend, *args).compile()
    timing = measure(functools.partial(compiled, *args)).shared_by(layers)
    flops = 4.0 * pairs * heads.num_heads * heads.head_dim
    run.report.timing(
        key, timing, run.floor_ms(num_bytes, flops), implementation=implementation,
        layers=layers, floor_bytes=num_bytes, floor_flops=flops, **detail,
    )  # fmt: skip


def layout_of(heads: Heads, groups: Sequence[Group], shape: StepShape, cells: int) -> Layout:
    """Return a pool that holds the contexts exactly, and a table for what plain XLA reads."""
    stretches = len(groups) * -(-cells // len(groups) // 1024)
    return Layout(
        heads=heads, dtype="bfloat16", num_pages=cells // _PAGE_SIZE, page_size=_PAGE_SIZE,
        shape=shape, table_len=max(2 * stretches, 16),
    )  # fmt: skip


def _num_layers(sizes: Sizes, num_bytes: int, name: str) -> int:
    """Layers that are timed together: more than caches hold, with the plan that all of them share.

    A step makes that plan once, too.
    """
    most = _MOST_XLA_LAYERS if name == "xla" else _MOST_LAYERS
    return min(max(math.ceil(sizes.pool_bytes / num_bytes), 1), most)


def dot_product(run: Run, rows: int, context: int, *, shared: bool) -> None:
    """Time jax.nn.dot_product_attention over contiguous keys and values.

    Args:
      shared: rows share one context, as the tokens of one sequence do.
    """
    heads = run.sizes.real
    sequences, tokens = (1, rows) if shared else (rows, 1)
    num_bytes = sequences * context * heads.bytes_per_cell
    layers = _num_layers(run.sizes, num_bytes, "dot_product")
    key = f"{'group' if shared else 'decode'} dot_product {rows}x{context}"
    require_bytes(layers * num_bytes, f"{key}: keys and values")
    draw = functools.partial(noise, dtype="bfloat16")
    q = draw(
        np.uint32(1), np.float32(1), shape=(sequences, tokens, heads.num_heads, heads.head_dim)
    )
    of_kv = (sequences, context, heads.num_kv_heads, heads.head_dim)
    layer_kv = [
        tuple(draw(np.uint32(2 * layer + side), np.float32(1), shape=of_kv) for side in (0, 1))
        for layer in range(1, layers + 1)
    ]

    def attend(implementation: Any, q: Any, layer_kv: Any) -> Any:
        for k, v in layer_kv:
            q = jax.nn.dot_product_attention(q, k, v, implementation=implementation)
        return q

    flops = 4.0 * rows * context * heads.num_heads * heads.head_dim
    refused = None
    implementations = ["cudnn", "xla"] if jax.default_backend() == "gpu" else ["xla"]
    for implementation in implementations:
        try:
            function = functools.partial(attend, implementation)
            compiled = device_problem.lower(function, q, layer_kv).compile()
            timing = measure(functools.partial(compiled, q, layer_kv)).shared_by(layers)
        except Exception as error:
            # cuDNN refuses some shapes, at whatever stage; what it says is kept.
            if implementation == implementations[-1]:
                raise
            refused = f"{implementation}: {str(error)[:200]}"
            continue
        run.report.timing(
            key, timing, run.floor_ms(num_bytes, flops), implementation=implementation,
            layers=layers, refused=refused, floor_bytes=num_bytes, floor_flops=flops,
            rows=rows, context=context,
        )  # fmt: skip
        return


def decode_name(name: str, rows: int, context: int) -> str:
    """Return the name under which a decode timing is found."""
    return f"decode {name} {rows}x{context}"


def _group_name(name: str, rows: int) -> str:
    return f"group {name} {rows}"


def decode_bar(found: dict[str, dict[str, Any]], sizes: Sizes) -> Bar | None:
    """h200.decode: the floor's share of the time at most rows."""
    part = found.get(decode_name("kernel", max(sizes.rows), sizes.context))
    if part is None:
        return None
    return Bar(value=part["floor_ms"] / part["ms"], n=part["n"], detail=part)


def group_bar(found: dict[str, dict[str, Any]], sizes: Sizes) -> Bar | None:
    """h200.group: beside one row; and beside as many rows with contexts of their own."""
    most = max(sizes.group_rows)
    parts = [
        found.get(name)
        for name in (
            _group_name("kernel", most),
            _group_name("kernel", 1),
            decode_name("kernel", most, sizes.context),
        )
    ]
    together, one, apart = parts
    if together is None or one is None or apart is None:
        return None
    share = together["ms"] / apart["ms"]
    return Bar(
        value=together["ms"] / one["ms"], n=together["n"], sound=share <= 1 / 8,
        detail={
            "together_ms": together["ms"], "one_ms": one["ms"], "apart_ms": apart["ms"],
            "share_of_apart": share, "limit_of_share": 1 / 8,
        },
    )  # fmt: skip
