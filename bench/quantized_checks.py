"""Weights in few bits beside floats: what they cost in quality, what they gain in speed and memory.

    python bench/quantized_checks.py [--model MODEL] [--rounds N] [--out FILE]

Three tables: how far next-token distributions move (KL divergence from those of 32-bit floats, over
all positions of twenty texts), speed of engines that take turns, and single products by the number
of rows, bf16 among them.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
import quantized_texts
from common import Report

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.kernels_pallas import dispatch
from jaxstate.models import loading, plain_forward, quantized, sources
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.models.products import Products
from jaxstate.state import StepShape

PREFILL = "prefill_tokens_per_s"
FLOATS = ("float32", "bfloat16")
QUANTIZED = ("stored", "int8", "int8-channel", "int4")
CONTEXT, DECODED = 512, 24  # tokens
ROWS = (1, 4, 8, 16, 64, 256)
INPUTS, OUTPUTS = 576, 1536
MATRICES = 24  # more than the second-level caches hold


def quality(path: pathlib.Path, report: Report) -> list[dict[str, Any]]:
    """Measure the mean KL divergence of every form from 32-bit floats, in nats."""
    reference = loading.load(path)
    encoded = [reference.tokenizer.encode(text) for text in quantized_texts.texts()]
    expected = _logprobs(reference, encoded)
    floats = _num_bytes(reference)
    del reference
    rows = []
    for name in (FLOATS[1], *QUANTIZED):
        common.note(f"quality of {name}")
        model = _load(path, name)
        divergences, same = [], []
        for wanted, found in zip(expected, _logprobs(model, encoded), strict=True):
            divergences.append((np.exp(wanted) * (wanted - found)).sum(axis=-1))
            same.append(wanted.argmax(axis=-1) == found.argmax(axis=-1))
        per_token, size = np.concatenate(divergences), _num_bytes(model)
        rows.append({
            "arm": "quality", "weights": name, "kl_nats": float(per_token.mean()),
            "kl_p99_nats": float(np.percentile(per_token, 99)),
            "kl_worst_text_nats": float(max(one.mean() for one in divergences)),
            "same_top1": float(np.concatenate(same).mean()), "texts": len(encoded),
            "tokens": len(per_token), "weights_bytes": size, "of_f32": size / floats,
        })  # fmt: skip
        report.line(**rows[-1])
    return rows


def _load(path: pathlib.Path, name: Any) -> LoadedModel:
    if name in FLOATS:
        return loading.load(path, dtype=name)
    return loading.load(path, weights=name)


def _num_bytes(model: LoadedModel) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


def _logprobs(model: LoadedModel, encoded: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return natural log-probabilities after every token of every text, in float64."""
    longest = max(map(len, encoded))
    products = _products(model)
    compiled = jax.jit(
        lambda params, ids: plain_forward.logits(params, model.config, ids, products=products)
    )
    found = []
    for ids in encoded:
        padded = np.zeros(longest, np.int32)
        padded[: len(ids)] = ids
        logits = np.asarray(compiled(model.params, padded), np.float64)[: len(ids)]
        peak = logits.max(axis=-1, keepdims=True)
        found.append(logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True)))
    return found


def _products(model: LoadedModel) -> Products:
    chosen = dispatch.choose(
        "auto", model.config.head_dim, model.config.dtypes.cache_dtype, _kernel_cache()
    )
    return Products(quantized=dispatch.product(chosen) or quantized.plain_product)


def _kernel_cache() -> pathlib.Path:
    return platformdirs.user_cache_path("jaxstate") / "kernels"


def speed(path: pathlib.Path, rounds: int, report: Report) -> list[dict[str, Any]]:
    """Time a prefill of 512 tokens and decoding behind them, engines taking turns."""
    engines, sizes = {}, {}
    for name in (*FLOATS, *QUANTIZED):
        common.note(f"starting an engine on {name}")
        model = _load(path, name)
        sizes[name] = _num_bytes(model)
        shapes = tuple(StepShape(num_tokens=n, block_tokens=n, num_rows=1) for n in (1, 16, 512))
        config = EngineConfig(
            num_pages=24, page_size=64, context_len=1024, evict_quantum=256, step_shapes=shapes
        )
        engines[name] = Engine(model.params, model.config, config)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, CONTEXT).tolist()
    prefills: dict[str, list[float]] = {name: [] for name in engines}
    questions: dict[str, list[float]] = {name: [] for name in engines}
    decodes: dict[str, list[float]] = {name: [] for name in engines}
    load = common.OtherLoad(list)
    for _ in range(rounds + 1):  # the first warms up
        for name, engine in engines.items():
            session = engine.create()

            def append(engine=engine, session=session):
                engine.append(session, ids)
                engine.executor.wait()

            def ask(count, engine=engine, session=session):
                engine.query(session, ids[:14], max_new_tokens=count)

            prefills[name].append(common.milliseconds(append))
            questions[name].append(common.milliseconds(lambda: ask(1)))
            longer = common.milliseconds(lambda: ask(1 + DECODED))
            decodes[name].append((longer - questions[name][-1]) / DECODED)
            engine.close(session)
    load.end("speed")
    rows = []
    for name in engines:
        rows.append({
            "arm": "speed", "weights": name, "weights_bytes": sizes[name], "context": CONTEXT,
            **common.spread("decode", decodes[name][1:]),
            **common.spread("question_14", questions[name][1:]),
            PREFILL: CONTEXT / common.median(prefills[name][1:]) * 1e3,
            "implementation": engines[name].executor.implementation,
            "spoiled": load.reason("speed"),
        })  # fmt: skip
        report.line(**rows[-1])
    return rows


def products(report: Report, rounds: int) -> list[dict[str, Any]]:
    """Time one product by its number of rows, in floats of both widths and in few bits."""
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32) for _ in range(MATRICES)]
    kernel = dispatch.choose("auto", 64, jnp.float32, _kernel_cache())
    product = dispatch.product(kernel) or quantized.plain_product

    def floats(dtype):
        weights = [jnp.asarray(matrix.T, dtype) for matrix in matrices]
        product = functools.partial(
            jnp.matmul, preferred_element_type=jnp.float32,
            precision="highest" if dtype == jnp.float32 else "default",
        )  # fmt: skip
        return jax.jit(lambda x, weights: [product(x.astype(dtype), w) for w in weights]), weights

    def codes(name):
        form = quantized.FORMS[name]
        weights = [jax.device_put(quantized.quantize(matrix, form)) for matrix in matrices]
        multiply = jax.jit(lambda x, weights: [quantized.multiply(x, w, product) for w in weights])
        return multiply, weights

    arms = {name: floats(jnp.dtype(name)) for name in FLOATS} | {
        name: codes(name) for name in quantized.FORMS
    }
    found = []
    for count in ROWS:
        x = jnp.asarray(rng.standard_normal((count, INPUTS)), jnp.float32)
        samples: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds + 1):
            for name, (multiply, weights) in arms.items():
                run = functools.partial(multiply, x, weights)
                took = common.milliseconds(lambda run=run: jax.block_until_ready(run()))
                samples[name].append(took / MATRICES)
        best = {f"{name}_us": 1e3 * min(values[1:]) for name, values in samples.items()}
        found.append({"arm": "product", "rows": count, "inputs": INPUTS, "outputs": OUTPUTS} | best)
        report.line(**found[-1])
    return found


def tables(rows: Sequence[dict[str, Any]]) -> None:
    """Print what was measured for people to stderr."""
    for arm, columns in (
        ("quality", ("weights", "of_f32", "kl_nats", "kl_p99_nats", "same_top1")),
        ("speed", ("weights", "weights_bytes", "decode_ms", "question_14_ms", PREFILL)),
        ("product", ("rows", *(f"{name}_us" for name in (*FLOATS, *quantized.FORMS)))),
    ):
        common.note("\n" + "".join(f"{column:>22}" for column in columns))
        for row in rows:
            if row["arm"] == arm:
                values = (row[column] for column in columns)
                cells = (f"{one:.4g}" if isinstance(one, float) else str(one) for one in values)
                common.note("".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="Weights in few bits.")
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a known name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    report = Report(
        "quantized", command="python bench/quantized_checks.py", quick=False, path=args.out
    )
    report.line(arm="machine", **common.machine_facts())
    path = sources.resolve(args.model)
    rows = products(report, args.rounds) + speed(path, args.rounds, report) + quality(path, report)
    tables(rows)


if __name__ == "__main__":
    main()
