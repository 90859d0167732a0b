"""Weights in few bits: what GGUF files store, what is quantized, and that a model answers alike."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import gguf
import jax
import jax.numpy as jnp
import model_files
import numpy as np
import plain_gguf
import plain_models
import pytest

from jaxstate import models
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.kernels_pallas import cpu_library
from jaxstate.models import gguf_codes, quantized
from jaxstate.models.config import Quantization
from jaxstate.models.gguf_tables import GgufTensor
from jaxstate.models.quantized import QuantizedMatrix
from jaxstate.state import StepShape

DATA = pathlib.Path(__file__).parents[1] / "serving" / "data" / "parity"
FORMS = [
    Quantization(bits=8),
    Quantization(bits=8, group=16),
    Quantization(bits=8, group=48, offsets=True),
    Quantization(bits=4, group=32, offsets=True),
    Quantization(bits=4, offsets=True),
]
STORED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]


def _values(matrix: QuantizedMatrix) -> np.ndarray:
    """Weights in float64 by index arithmetic alone, padding included."""
    codes, scales = np.asarray(matrix.codes), np.asarray(matrix.scales, np.float64)
    if codes.dtype == np.uint8:
        wide = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]), np.int64)
        for at in range(wide.shape[-1]):
            block, place = divmod(at, 32)
            byte = codes[..., 16 * block + place % 16]
            wide[..., at] = byte // 16 if place >= 16 else byte % 16
        codes = wide
    group = codes.shape[-1] // scales.shape[-1]
    values = codes * np.repeat(scales, group, axis=-1)
    if matrix.offsets is not None:
        values += np.repeat(np.asarray(matrix.offsets, np.float64), group, axis=-1)
    return values


def _tensor(encoding: str, rows: int, blocks: int) -> GgufTensor:
    """A tensor of random bits in blocks of an encoding, with factors that are finite."""
    kind = gguf.GGMLQuantizationType[encoding]
    length, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(size)
    data = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    factors = rng.uniform(-0.1, 0.1, (rows, blocks, 2)).astype(np.float16).view(np.uint8)
    at = 208 if encoding == "Q6_K" else 0
    count = 4 if encoding in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
    data[..., at : at + count] = factors[..., :count]
    return GgufTensor(shape=(rows, blocks * length), encoding=kind, data=data.reshape(rows, -1))


@pytest.mark.parametrize("encoding", STORED)
def test_a_stored_tensor_has_the_weights_the_gguf_library_gives_it(monkeypatch, encoding):
    tensor = _tensor(encoding, 5, 3)
    block_len = gguf.GGML_QUANT_SIZES[tensor.encoding][0]
    monkeypatch.setattr(gguf_codes, "_NUMBERS_AT_ONCE", 4 * block_len)  # 15 blocks in pieces of 4
    matrix = gguf_codes.matrix_of(tensor)
    assert matrix is not None and matrix.shape == tensor.shape
    expected = gguf.dequantize(tensor.data, tensor.encoding)
    tolerance = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(_values(matrix), expected, rtol=0, atol=tolerance)
    codes = (matrix.codes, matrix.scales, matrix.offsets)
    np.testing.assert_allclose(quantized.dequantize(*codes), expected, rtol=0, atol=tolerance)


def test_a_tensor_of_an_encoding_without_such_a_form_stays_as_it_is():
    data = np.zeros((2, 84), np.uint8)
    tensor = GgufTensor(shape=(2, 256), encoding=gguf.GGMLQuantizationType.Q2_K, data=data)
    assert gguf_codes.matrix_of(tensor) is None


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(7, 96), (2, 3, 40), (1, 7)], ids=str)
def test_a_quantized_weight_is_within_half_a_step_of_its_group(monkeypatch, form, shape):
    monkeypatch.setattr(quantized, "_NUMBERS_AT_ONCE", 3 * shape[-1])  # pieces of three outputs
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    values[0] = 0.25
    matrix = quantized.quantize(values, form)
    assert quantized.describe(matrix).bits == form.bits
    restored = _values(matrix)[..., : shape[-1]]
    group = restored.shape[-1] if form.group is None else form.group
    steps = np.repeat(np.asarray(matrix.scales), group, axis=-1)[..., : shape[-1]]
    assert (np.abs(restored - values) <= 0.5001 * steps + 1e-6).all()
    levels = 15 if form.bits == 4 else 255 if form.offsets else 254
    assert (steps * levels <= np.ptp(values) * 2.001 + 0.5).all()


def test_padding_is_as_wide_as_whole_groups_and_changes_no_product():
    rng = np.random.default_rng(1)
    values, x = rng.standard_normal((5, 40)).astype(np.float32), rng.standard_normal((3, 40))
    for form in FORMS:
        matrix = quantized.quantize(values, form)
        abstract = quantized.abstract(form, (5, 40), (5, 40))
        same = jax.tree.map(
            lambda a, b: a.shape == b.shape and a.dtype == b.dtype, matrix, abstract
        )
        assert all(jax.tree.leaves(same))
        result = quantized.multiply(x.astype(np.float32), matrix, quantized.plain_product)
        np.testing.assert_allclose(result, x @ _values(matrix)[:, :40].T, rtol=0, atol=1e-4)


def _dense_logits(params: models.Params, model: models.ModelConfig, ids: jax.Array) -> np.ndarray:
    with jax.numpy_dtype_promotion("strict"):
        compiled = jax.jit(lambda params, ids: models.plain_forward.logits(params, model, ids))
        return np.asarray(compiled(params, ids))


def _to_layout(values: np.ndarray, spec: models.ParamSpec) -> np.ndarray:
    """Turn weights as files have them into those of a float model, padding dropped."""
    vocab = spec.axes[0] == "vocab"
    values = values[..., : spec.shape[-1] if vocab else spec.fan_in]
    return values.reshape(spec.shape) if vocab else values.swapaxes(-1, -2).reshape(spec.shape)


def _assert_same_weights(loaded, floats, tolerance: float) -> None:
    """Compare weights with those of the float model, quantized ones to a share of the largest."""
    (config, params), (float_config, float_params) = loaded, floats
    assert dataclasses.replace(config, quantized=()) == float_config
    models.check_params(params, config)
    forms = dict(config.quantized)
    assert forms
    specs, expected = {}, {}
    models.map_specs(specs.__setitem__, config)
    flat = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda node: isinstance(node, QuantizedMatrix)
    )
    for name, leaf in jax.tree_util.tree_leaves_with_path(float_params):
        expected[jax.tree_util.keystr(name, simple=True, separator=".")] = leaf
    for name, leaf in flat:
        path = jax.tree_util.keystr(name, simple=True, separator=".")
        weight = np.asarray(expected[path])
        if path not in forms:
            np.testing.assert_array_equal(leaf, weight)
            continue
        assert quantized.describe(leaf).bits == forms[path].bits and leaf.shape == weight.shape
        found = _to_layout(_values(leaf), specs[path])
        assert np.abs(found - weight).max() <= tolerance * np.abs(weight).max(), path


@pytest.mark.parametrize("weights, tolerance", [("int8-channel", 0.501 / 127), ("int4", 1.01 / 15)])
@pytest.mark.parametrize("name", ["phi3-partial", "mixtral", "qwen3_moe", "smollm3"])
def test_families_are_quantized_row_by_row_wherever_their_rows_lie(
    tmp_path, name, weights, tolerance
):
    config = plain_models.config_of(name)
    path = model_files.write_hf_dir(tmp_path, config, plain_models.tensors_of(config))
    loaded = models.load_safetensors(path, weights=weights)
    _assert_same_weights(loaded, models.load_safetensors(path), tolerance)
    paths = [path for path, _ in loaded[0].quantized]
    assert not any(path.endswith("router") for path in paths)
    assert any("experts" in path for path in paths) == bool(loaded[0].experts)
    vocabulary = [form.bits for path, form in loaded[0].quantized if path in ("embed", "lm_head")]
    assert set(vocabulary) == {8}  # four bits of these cost more than those of all others


@pytest.mark.parametrize("name", list(plain_gguf.CONVERTIBLE))
def test_what_gguf_files_of_every_family_store_is_kept_without_loss(tmp_path, name):
    sizes = {"hidden_size": 32, "intermediate_size": 64}  # whole blocks
    config = plain_models.config_of(name) | plain_gguf.CONVERTIBLE[name] | sizes
    tensors = plain_gguf.tensors_of(config, plain_models.tensors_of(config))
    matrices = {name for name, one in tensors.items() if one.ndim > 1 and one.shape[-1] % 32 == 0}
    path = model_files.write_gguf(
        tmp_path / "x.gguf", plain_gguf.metadata_of(config), tensors,
        architecture=plain_gguf.architecture_of(config), quantized=frozenset(matrices),
    )  # fmt: skip
    loaded = models.load_gguf(path, weights="stored")
    assert matrices and len(loaded[0].quantized) >= len(matrices)
    _assert_same_weights(loaded, models.load_gguf(path), 1e-7)


@pytest.mark.parametrize("name", ["mixtral", "gemma3_text"])
def test_a_quantized_model_computes_with_the_weights_it_stands_for(tmp_path, name):
    config = plain_models.config_of(name)
    path = model_files.write_hf_dir(tmp_path, config, plain_models.tensors_of(config))
    model, params = models.load_safetensors(path, weights="int4")
    specs = {}
    models.map_specs(specs.__setitem__, model)
    floats = jax.tree_util.tree_map_with_path(
        lambda name, leaf: (
            jnp.asarray(
                _to_layout(
                    _values(leaf), specs[jax.tree_util.keystr(name, simple=True, separator=".")]
                ),
                jnp.float32,
            )
            if isinstance(leaf, QuantizedMatrix)
            else leaf
        ),
        params,
        is_leaf=lambda node: isinstance(node, QuantizedMatrix),
    )
    ids = jnp.arange(3, 27, dtype=jnp.int32)
    found, expected = _dense_logits(params, model, ids), _dense_logits(floats, model, ids)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> pathlib.Path:
    """A tiny model with its tokenizer, all matrices in Q8_0."""
    metadata, tensors = model_files.tiny_gguf_parts()
    matrices = frozenset(name for name, tensor in tensors.items() if tensor.ndim == 2)
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return model_files.write_gguf(path, metadata, tensors, quantized=matrices)


def _engine(
    model: models.LoadedModel, implementation: str, *, page_size: int, context_len: int, tokens: int
) -> Engine:
    shapes = (
        StepShape(num_tokens=1, block_tokens=1, num_rows=1),
        StepShape(num_tokens=tokens, block_tokens=tokens, num_rows=1),
    )
    config = EngineConfig(
        num_pages=12, page_size=page_size, context_len=context_len, evict_quantum=page_size,
        step_shapes=shapes, implementation=implementation,
    )  # fmt: skip
    with jax.numpy_dtype_promotion("strict"):
        return Engine(model.params, model.config, config)


@pytest.mark.parametrize("weights, implementation", [("int8-channel", "cpu"), ("int4", "xla")])
def test_engine_on_quantized_weights_equals_the_dense_forward(tiny, weights, implementation):
    if implementation == "cpu" and (reason := cpu_library.unsupported()):
        pytest.skip(reason)
    model = models.load(tiny, weights=weights)
    ids = np.random.default_rng(5).integers(0, model.config.vocab_size, 29)
    logits = _dense_logits(model.params, model.config, jnp.asarray(ids, jnp.int32))
    engine = _engine(model, implementation, page_size=8, context_len=40, tokens=8)
    session = engine.create()
    engine.append(session, ids[:20].tolist())
    ready = engine.advance(session, ids[20:].tolist()).ready
    np.testing.assert_allclose(ready.row_logits(), logits[-1], rtol=0, atol=1e-4)


def test_every_choice_of_weights_has_its_own_fingerprint(tiny):
    loaded = [models.load(tiny, weights=name) for name in ("float", *quantized.FORMS, "stored")]
    assert len({model.fingerprint for model in loaded}) == len(loaded)
    assert models.load(tiny, weights="int8").fingerprint == loaded[1].fingerprint


def test_check_params_names_a_quantized_weight_that_is_wrong(tiny):
    model = models.load(tiny, weights="int8")
    layer = model.params["layers"][0]
    matrix = layer["w_up"]
    for wrong, message in [
        (matrix.replace(scales=matrix.scales.at[3].set(jnp.nan)), "w_up.*finite"),
        (matrix.replace(codes=matrix.codes[:-1]), "w_up.*expected \\(64, 32\\) int8"),
        (matrix.replace(offsets=matrix.scales), "another structure"),
    ]:
        layers = (layer | {"w_up": wrong}, *model.params["layers"][1:])
        with pytest.raises(ValueError, match=message):
            models.check_params(model.params | {"layers": layers}, model.config)
    models.check_params(model.params, model.config)


def test_weights_that_cannot_be_had_are_refused(tmp_path, tiny):
    with pytest.raises(ValueError, match="weights: expected one of .*, got 'int3'"):
        models.load(tiny, weights="int3")
    directory = model_files.write_hf_dir(tmp_path, *model_files.tiny_hf_parts())
    with pytest.raises(ValueError, match='weights: expected .*, got "stored", which only GGUF'):
        models.load_safetensors(directory, weights="stored")
    settings, tensors = model_files.tiny_hf_parts()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    directory = model_files.write_hf_dir(tmp_path / "inf", settings, tensors)
    for weights in ("int8", "int4"):
        with pytest.raises(ValueError, match="layers.1.w_up: expected finite numbers"):
            models.load_safetensors(directory, weights=weights)
    with pytest.raises(ValueError, match="quantized weights stay on one device"):
        models.place(*_params_and_config(tiny), None)


def _params_and_config(path: pathlib.Path):
    config, params = models.load_gguf(path, weights="int8")
    return params, config


@pytest.mark.parametrize(
    "form, message",
    [
        (dict(bits=3), "bits: expected 4 or 8, got 3"),
        (dict(bits=8, group=24), "group: expected a multiple of 16, got 24"),
        (dict(bits=4, group=16, offsets=True), "group: expected a multiple of 32, got 16"),
        (dict(bits=4), "offsets: expected True"),
    ],
)
def test_forms_that_no_product_takes_are_refused(form, message):
    with pytest.raises(ValueError, match=message):
        Quantization(**form)


# The real model


@pytest.mark.long
def test_stored_smollm2_answers_like_hugging_face_on_dequantized_weights(smollm2_path):
    model = models.load(smollm2_path, weights="stored")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert size < 0.21 * 4 * models.num_params(model.config)
    engine = _engine(model, "auto", page_size=64, context_len=256, tokens=32)
    for record in json.loads((DATA / "smollm2-135m.json").read_text()):
        session = engine.create()
        logits = np.asarray(engine.advance(session, record["ids"]).ready.row_logits())
        for token_id, logit in record["top5"]:
            assert abs(logits[token_id] - logit) < 1e-3
        answer = engine.generate(record["ids"], max_new_tokens=len(record["new"]), top_logprobs=2)
        for token, expected in zip(answer.tokens, record["new"], strict=True):
            if (
                token.token_id != expected
            ):  # a near-tie ends the comparison, by the rule of equality
                first, second = list(token.top_logprobs.values())[:2]
                assert first - second < 2e-3
                break
