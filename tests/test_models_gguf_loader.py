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
from jaxstate.models import gguf_file


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
        (
            lambda t: t | {"blk.0.attn_q.bias": np.zeros(64, np.float32)},
            "expected tensor blk.0.attn_k.bias",
        ),
        (lambda t: t | {"blk.0.attn_x.weight": np.ones(8, np.float32)}, "got blk.0.attn_x.weight"),
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


def _split(directory, metadata, tensors):
    """Write the model in four parts; return the first one."""
    names = list(tensors)
    for number in range(4):
        split = {"split.count": 4, "split.no": number, "split.tensors.count": len(names)}
        path = directory / f"tiny-{number + 1:05}-of-00004.gguf"
        part = {name: tensors[name] for name in names[number::4]}
        model_files.write_gguf(path, split | (metadata if number == 0 else {}), part)
    return directory / "tiny-00001-of-00004.gguf"


def test_split_model_loads_like_one_file(tmp_path, tiny_gguf):
    path, metadata, tensors = tiny_gguf
    first = _split(tmp_path, metadata, tensors)
    config, params = models.load_gguf(path)
    split_config, split_params = models.load_gguf(first)
    assert split_config == config
    model_files.assert_bitwise_equal(split_params, params)
    file = models.GgufFile(first)
    assert list(file.paths) == sorted(tmp_path.iterdir())


def test_incomplete_or_mixed_up_split_model_is_refused(tmp_path, tiny_gguf):
    _, metadata, tensors = tiny_gguf
    first = _split(tmp_path, metadata, tensors)
    second, third, fourth = sorted(tmp_path.iterdir())[1:]
    with pytest.raises(ValueError, match="split.no: expected 0 .*, got 2 of 4 parts; give the fir"):
        models.load_gguf(third)
    with pytest.raises(ValueError, match="split.no: expected 0 .*, got 0 of 4 parts"):
        models.load_gguf(first.rename(tmp_path / "renamed.gguf"))
    (tmp_path / "renamed.gguf").rename(first)
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match="expected part 3 of tiny-00001.*, got another file"):
        models.load_gguf(first)
    third.write_bytes(content)
    fourth.unlink()
    with pytest.raises(ValueError, match="expected tiny-00004-of-00004.gguf beside it, got no"):
        models.load_gguf(first)


def test_metadata_of_every_type_is_read_as_the_library_reads_it(tmp_path, tiny_gguf):
    _, _, tensors = tiny_gguf
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in {
        "uint8": 200, "int8": -3, "uint16": 65_000, "int16": -300, "uint32": 1 << 31,
        "int32": -(1 << 20), "uint64": 1 << 63, "int64": -(1 << 40), "float32": 0.1,
        "float64": 0.1, "bool": True, "string": "Ġ▁é🙂", "array": ["a", "", "é"],
    }.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("scores", [0.5, -1.25])
    writer.add_array("flags", [True, False])
    writer.add_tensor("t", tensors["output_norm.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = gguf.GGUFReader(path).fields
    expected = {key: field.contents() for key, field in fields.items() if "GGUF." not in key}
    metadata = models.GgufFile(path).metadata
    assert metadata == expected
    assert {key: type(value) for key, value in metadata.items()} == {
        key: type(value) for key, value in expected.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_in_pieces_is_the_tensor_at_once(tmp_path, tiny_gguf, dtype, monkeypatch):
    _, metadata, tensors = tiny_gguf
    monkeypatch.setattr(gguf_file, "_BLOCK_NUMBERS", 5 * 32)  # 264 rows of 32 in 53 pieces
    name = "token_embd.weight"
    path = tmp_path / "q8.gguf"
    model_files.write_gguf(path, metadata, tensors, quantized=frozenset({name}))
    _, params = models.load_gguf(path, dtypes=models.DtypePolicy.named(dtype))
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)
    np.testing.assert_array_equal(params["embed"], expected.astype(dtype))
