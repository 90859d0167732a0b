"""Logits of loaded models against Hugging Face's, recorded in tests/data."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest

from jaxstate import models

DATA = pathlib.Path(__file__).parent / "data"
SMOLLM2 = DATA.parent.parent / "serving" / "data" / "parity" / "smollm2-135m.json"
PADDED_LEN = 48
# Both sides compute in f32 and sum in another order.
TOLERANCE = {"smollm2": 1e-2, "tiny": 1e-5}


def _read(name: str):
    return json.loads((DATA / name).read_text())


@pytest.fixture(scope="module")
def smollm2_logits(smollm2_model):
    config, params = smollm2_model.config, smollm2_model.params
    with jax.numpy_dtype_promotion("strict"):
        compiled = jax.jit(lambda params, ids: models.plain_forward.logits(params, config, ids))
        ids = jax.ShapeDtypeStruct((PADDED_LEN,), jnp.int32)
        compiled = compiled.lower(params, ids).compile()

    def logits(ids: list[int]) -> np.ndarray:
        """Logits after every token; the padding behind them is not seen by causal attention."""
        padded = np.zeros(PADDED_LEN, np.int32)
        padded[: len(ids)] = ids
        return np.asarray(compiled(params, padded))[: len(ids)]

    return logits


@pytest.mark.parametrize("record", _read(SMOLLM2), ids=lambda record: record["prompt"])
def test_smollm2_greedy_continuation_equals_hugging_face(smollm2_logits, record):
    # Causal attention makes one pass over prompt and answer equal to a pass per token: each
    # argmax is the recorded next token, so by induction greedy decoding gives the record.
    prompt, new = record["ids"], record["new"]
    logits = smollm2_logits(prompt + new[:-1])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == new


@pytest.mark.parametrize("record", _read(SMOLLM2), ids=lambda record: record["prompt"])
def test_smollm2_top_five_logits_equal_hugging_face(smollm2_logits, record):
    logits = smollm2_logits(record["ids"])[-1]
    order = np.argsort(-logits)[:5]
    assert order.tolist() == [token_id for token_id, _ in record["top5"]]
    expected = [logit for _, logit in record["top5"]]
    np.testing.assert_allclose(logits[order], expected, atol=TOLERANCE["smollm2"])


@pytest.mark.parametrize(
    "case", _read("hf_tiny_llama.json")["cases"], ids=lambda case: case["name"]
)
def test_tiny_llama_logits_equal_hugging_face(tmp_path, case):
    rng = np.random.default_rng(7)
    tensors = {}
    for name in sorted(case["shapes"]):
        draw = rng.standard_normal(tuple(case["shapes"][name]), np.float32)
        is_norm = draw.ndim == 1
        tensors[name] = 1 + draw * np.float32(0.1) if is_norm else draw * np.float32(0.3)
    directory = model_files.write_hf_dir(tmp_path, case["config"], tensors)
    config, params = models.load_safetensors(directory)
    with jax.numpy_dtype_promotion("strict"):
        ids = jnp.asarray(case["token_ids"], jnp.int32)
        logits = models.plain_forward.logits(params, config, ids)
    np.testing.assert_allclose(logits, case["logits"], atol=TOLERANCE["tiny"])
