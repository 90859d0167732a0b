"""GGUF files: what is read, and refusals that explain."""

from __future__ import annotations

import struct

import gguf
import hypothesis
import jax
import model_files
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxstate import models


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """Path of a good GGUF file, its metadata and its tensors."""
    metadata, tensors = model_files.tiny_gguf_parts()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return model_files.write_gguf(path, metadata, tensors), metadata, tensors


def test_quantized_tensor_is_dequantized(tmp_path, tiny_gguf):
    _, metadata, tensors = tiny_gguf
    name = "blk.1.ffn_down.weight"
    path = tmp_path / "q8.gguf"
    model_files.write_gguf(path, metadata, tensors, quantized=frozenset({name}))
    _, params = models.load_gguf(path)
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)
    np.testing.assert_array_equal(params["layers"][1]["w_down"], expected.T)
    np.testing.assert_allclose(expected, tensors[name], atol=0.01)  # Q8_0: max / 127 a step


def test_loaded_weights_do_not_alias_the_file(tmp_path, tiny_gguf):
    path, _, _ = tiny_gguf
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    _, params = models.load_gguf(copy)
    before = jax.tree.map(np.array, params)
    with copy.open("r+b") as file:
        file.seek(0)
        file.write(b"\xff" * copy.stat().st_size)
    model_files.assert_bitwise_equal(jax.tree.map(np.array, params), before)


def test_missing_gguf_file_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        models.load_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    "header, message",
    [
        (b"", "expected a GGUF file"),
        (b"PK\x03\x04 a zip file", "expected a GGUF file"),
        (b"GGUF\x01\0\0\0" + b"\0" * 32, "got version 1"),
        (b"GGUF\x09\0\0\0" + b"\0" * 32, "got version 9"),
        (b"GGUF\0\0\0\x03" + b"\0" * 32, "big-endian"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 32, "truncated or damaged"),
    ],
)
def test_other_files_are_refused_as_gguf(tmp_path, header, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(header)
    with pytest.raises(ValueError, match=message):
        models.load_gguf(path)


def test_absurd_length_of_an_array_is_refused_at_once(tmp_path):
    path = tmp_path / "bad.gguf"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    array = struct.pack("<Q1sIIQ", 1, b"a", gguf.GGUFValueType.ARRAY, 4, 1 << 62)
    path.write_bytes(header + array + b"\0" * 64)
    with pytest.raises(ValueError, match="truncated or damaged"):
        models.load_gguf(path)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.floats(0, 1, exclude_max=True))
def test_gguf_truncated_anywhere_is_refused(tmp_path_factory, tiny_gguf, share):
    content = tiny_gguf[0].read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="GGUF file"):
        models.load_gguf(path)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(position=st.integers(0, 2**13), value=st.integers(0, 255))
def test_damaged_gguf_tables_never_fail_in_another_way(
    tmp_path_factory, tiny_gguf, position, value
):
    content = bytearray(tiny_gguf[0].read_bytes())
    content[position] = value
    path = tmp_path_factory.mktemp("flip") / "flip.gguf"
    path.write_bytes(content)
    try:
        file = models.GgufFile(path)
        models.load_gguf(file)
        models.Tokenizer.from_gguf(file)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: model_files.without(t, "blk.1.ffn_up.weight"),
            "expected tensor blk.1.ffn_up.weight",
        ),
        (lambda t: t | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "got blk.0.attn_q.bias"),
        (lambda t: t | {"rope_freqs.weight": np.ones(8, np.float32)}, "rope_freqs.weight"),
        (
            lambda t: t | {"blk.0.attn_k.weight": np.zeros((32, 64), np.float32)},
            r"blk.0.attn_k.weight: expected shape \(32, 32\), got \(32, 64\)",
        ),
        (
            lambda t: t | {"output_norm.weight": np.full(32, np.nan, np.float32)},
            "final_norm.*expected finite numbers",
        ),
        (
            lambda t: t | {"output_norm.weight": np.ones(32, np.int32)},
            "output_norm.weight: expected an encoding that can be dequantized, got I32",
        ),
    ],
)
def test_gguf_with_wrong_tensors_is_refused(tmp_path, tiny_gguf, change, message):
    _, metadata, tensors = tiny_gguf
    path = tmp_path / "bad.gguf"
    model_files.write_gguf(path, metadata, change(tensors))
    with pytest.raises(ValueError, match=message):
        models.load_gguf(path)


def test_split_gguf_is_refused(tmp_path, tiny_gguf):
    _, metadata, tensors = tiny_gguf
    path = tmp_path / "tiny-00001-of-00002.gguf"
    model_files.write_gguf(path, metadata | {"split.count": 2}, tensors)
    with pytest.raises(ValueError, match="split.count: expected 0 or 1, got 2"):
        models.load_gguf(path)
