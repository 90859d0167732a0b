"""Every family on tiny random checkpoints against the plain forward of the tests."""

from __future__ import annotations

import importlib
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from common import Limit, Report

from jaxstate.models import gguf_loader, plain_forward, safetensors_loader

LIMIT = Limit(op="<=", value=1e-4)
_NUM_TOKENS = 30


def families(report: Report) -> None:
    """Compare logits of every family, in both file formats."""
    sys.path.insert(0, str(common.ROOT / "tests"))
    plain = importlib.import_module("plain_models")
    ids = np.random.default_rng(3).integers(0, plain.SIZES["vocab_size"], _NUM_TOKENS)
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for label, (model, params), config, tensors in _loaded(pathlib.Path(scratch)):
            with jax.default_matmul_precision("highest"):
                found = plain_forward.logits(params, model, jnp.asarray(ids, jnp.int32))
            expected = plain.logits(config, tensors, ids)
            errors[label] = float(np.abs(np.asarray(found) - expected).max())
    report.bar(
        "parity.families", max(errors.values()), LIMIT,
        unit="largest |logit difference| from a plain f64 forward", n=len(errors), errors=errors,
    )


def _loaded(directory: pathlib.Path) -> Iterator[tuple[str, Any, dict, dict]]:
    """Write and load every checkpoint: its name, what was loaded, config.json and tensors."""
    model_files, plain, plain_gguf = (
        importlib.import_module(n) for n in ("model_files", "plain_models", "plain_gguf")
    )
    for name in plain.CONFIGS:
        config = plain.config_of(name)
        tensors = plain.tensors_of(config)
        path = model_files.write_hf_dir(directory / name, config, tensors)
        yield name, safetensors_loader.load_safetensors(path), config, tensors
        if name not in plain_gguf.CONVERTIBLE:
            continue
        config = config | plain_gguf.CONVERTIBLE[name]
        path = model_files.write_gguf(
            directory / f"{name}.gguf", plain_gguf.metadata_of(config),
            plain_gguf.tensors_of(config, tensors),
            architecture=plain_gguf.architecture_of(config),
        )
        yield f"{name}, GGUF", gguf_loader.load_gguf(path), config, tensors
