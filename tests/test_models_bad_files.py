"""Everything that can be wrong with a model's files: one sentence each, and nothing stays."""

from __future__ import annotations

import gc
import json
import pathlib
import struct

import command_line
import jax
import model_files
import numpy as np
import pytest

from jaxstate import models

METADATA, GGUF_TENSORS = model_files.tiny_gguf_parts()
SETTINGS, HF_TENSORS = model_files.tiny_hf_parts()
NAN = np.full(32, np.nan, np.float32)


def _gguf(metadata=None, tensors=None, **options):
    """Write a GGUF file with some metadata and tensors changed; None leaves a tensor out."""

    def write(directory: pathlib.Path) -> pathlib.Path:
        kept = {k: v for k, v in (GGUF_TENSORS | (tensors or {})).items() if v is not None}
        path = directory / "model.gguf"
        return model_files.write_gguf(path, METADATA | (metadata or {}), kept, **options)

    return write


def _edited_gguf(edit):
    def write(directory: pathlib.Path) -> pathlib.Path:
        path = _gguf()(directory)
        path.write_bytes(edit(path.read_bytes()))
        return path

    return write


def _hf(settings=None, tensors=None, edit=lambda directory: None):
    """Write a directory likewise; `edit` changes it afterwards."""

    def write(directory: pathlib.Path) -> pathlib.Path:
        kept = {k: v for k, v in (HF_TENSORS | (tensors or {})).items() if v is not None}
        model_files.write_hf_dir(directory, SETTINGS | (settings or {}), kept)
        (directory / "tokenizer.json").write_text(json.dumps(model_files.hf_tokenizer()))
        edit(directory)
        return directory

    return write


def _cut(name):
    def edit(directory):
        path = directory / name
        path.write_bytes(path.read_bytes()[:-7])

    return edit


def _directory_instead_of(name):
    def edit(directory):
        (directory / name).unlink()
        (directory / name).mkdir()

    return edit


def _link_to_itself(name):
    def edit(directory):
        (directory / name).unlink()
        (directory / name).symlink_to(name)

    return edit


def _longer_vocabulary(directory):
    contents = model_files.hf_tokenizer()
    contents["model"]["vocab"]["Ġextra"] = 300
    (directory / "tokenizer.json").write_text(json.dumps(contents))


CASES = {
    "GGUF: unknown architecture": (
        _gguf(architecture="mamba"),
        "general.architecture: expected one of llama.* got 'mamba'; use",
    ),
    "GGUF: missing tensor": (
        _gguf(tensors={"blk.1.ffn_up.weight": None}),
        "expected tensor blk.1.ffn_up.weight, got a file without it; the file is incomplete",
    ),
    "GGUF: extra tensor": (_gguf(tensors={"mystery": NAN}), "got mystery as well; use a model"),
    "GGUF: wrong shape": (
        _gguf(tensors={"output_norm.weight": NAN[1:]}),
        r"output_norm.weight: expected shape \(32,\), got \(31,\); the weights do not",
    ),
    "GGUF: NaN": (_gguf(tensors={"output_norm.weight": NAN}), "finite numbers, got NaN .*; the we"),
    "GGUF: integers": (
        _gguf(tensors={"output_norm.weight": np.ones(32, np.int32)}),
        "expected an encoding that can be dequantized, got I32; use another quantization",
    ),
    "GGUF: size missing": (
        _gguf(metadata={"llama.block_count": "two"}),
        "llama.block_count: expected a whole number of at least 1, got 'two'; the file is damaged",
    ),
    "GGUF: truncated": (
        _edited_gguf(lambda content: content[:-100]),
        r"expected a complete GGUF file, got one .*\(tensor .*\); it is truncated or damaged",
    ),
    "GGUF: truncated tables": (
        _edited_gguf(lambda content: content[:2000]),
        r"expected a complete GGUF file, .*\(needs .* has 2000\); it is truncated or damaged",
    ),
    "GGUF: other file": (
        _edited_gguf(lambda content: b"PK\3\4" + content),
        r"expected a GGUF file, got one that starts with b'PK.*'; give a .gguf file",
    ),
    "GGUF: empty": (_edited_gguf(lambda _: b""), "expected a GGUF file, got one that starts with"),
    "GGUF: version 1": (
        _edited_gguf(lambda content: content[:4] + struct.pack("<I", 1) + content[8:]),
        "expected GGUF version 2 or 3, got version 1; convert the model again",
    ),
    "GGUF: big-endian": (
        _edited_gguf(lambda content: content[:4] + struct.pack(">I", 3) + content[8:]),
        "expected a little-endian GGUF file, got a big-endian one; convert it",
    ),
    "GGUF: part of several": (
        _gguf(metadata={"split.count": 3, "split.no": 1}),
        "split.no: expected 0 in a file called …-00001-of-.*, got 1 of 3 parts; give the first",
    ),
    "GGUF: vocabulary longer than the embedding": (
        _gguf(
            metadata={"llama.vocab_size": 200},
            tensors={
                name: GGUF_TENSORS[name][:200] for name in ("token_embd.weight", "output.weight")
            },
        ),
        "expected a tokenizer of at most 200 ids, got 262; weights and tokenizer do not belong",
    ),
    "HF: unknown architecture": (
        _hf(settings={"architectures": ["MambaForCausalLM"]}),
        r"architectures: expected one of LlamaForCausalLM.* got \['MambaForCausalLM'\]; use",
    ),
    "HF: missing tensor": (
        _hf(tensors={"lm_head.weight": None}),
        "expected tensor lm_head.weight, got a file without it; the file is incomplete",
    ),
    "HF: extra tensor": (_hf(tensors={"mystery": NAN}), "got mystery as well; use a model"),
    "HF: wrong shape": (
        _hf(tensors={"model.norm.weight": NAN[1:]}),
        r"model.norm.weight: expected shape \(32,\), got \(31,\); the weights do not belong",
    ),
    "HF: NaN": (_hf(tensors={"model.norm.weight": NAN}), "finite numbers, got NaN .*; the weight"),
    "HF: integers": (
        _hf(tensors={"model.norm.weight": np.ones(32, np.int8)}),
        "model.norm.weight: expected F32, F16, BF16, got I8; use an unquantized copy",
    ),
    "HF: truncated weights": (
        _hf(edit=_cut("model.safetensors")),
        "expected a complete safetensors file, got one .*; it is truncated or damaged, fetch it",
    ),
    "HF: truncated config": (_hf(edit=_cut("config.json")), "config.json: expected JSON, got .*;"),
    "HF: truncated tokenizer": (
        _hf(edit=_cut("tokenizer.json")),
        "tokenizer.json: expected JSON, got something else .*; fetch the file again",
    ),
    "HF: vocabulary longer than the embedding": (
        _hf(edit=_longer_vocabulary),
        "expected a tokenizer of at most 264 ids, got 301; weights and tokenizer do not belong",
    ),
    "HF: no weights": (
        _hf(edit=lambda directory: (directory / "model.safetensors").unlink()),
        "expected model.safetensors or model.safetensors.index.json, got neither; save the model",
    ),
    "HF: empty directory": (lambda directory: directory, "config.json: expected a JSON file, got"),
    "HF: a directory for a file": (
        _hf(edit=_directory_instead_of("config.json")),
        "config.json: expected a file that can be read, got Is a directory; check the path",
    ),
    "HF: unreadable file": (
        _hf(edit=_link_to_itself("config.json")),
        "config.json: expected a file that can be read, got Too many levels of symbolic links; c",
    ),
    "a directory called like a GGUF file": (
        lambda directory: (directory / "x.gguf").mkdir() or directory / "x.gguf",
        "x.gguf/config.json: expected a JSON file, got none; give a Hugging Face model directory",
    ),
    "nothing there": (lambda directory: directory / "no.gguf", "got '.*no.gguf'; give a GGUF file"),
}


@pytest.mark.parametrize("write, message", CASES.values(), ids=CASES.keys())
def test_bad_files_are_one_sentence_and_leave_nothing(tmp_path, write, message):
    path = write(tmp_path)
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(ValueError, match=message) as caught:
        models.load(path)
    sentence = str(caught.value)
    assert "\n" not in sentence and "expected" in sentence and "got" in sentence
    assert "; " in sentence  # the remedy
    del caught
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_file_without_permission_is_one_sentence_and_status_2(tmp_path, capsys, monkeypatch):
    path = _gguf()(tmp_path)
    opens = pathlib.Path.open

    def refuse(self, *args, **kwargs):  # as for other users than root
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return opens(self, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with command_line.kept_jax_settings():
        result = command_line.run(
            capsys, "ask", "--model", path, "--prompt", "x", "--raw", "--cache-dir", tmp_path
        )
    assert (result.status, result.out) == (2, "")
    assert result.err.splitlines()[-1] == (
        f"jaxstate: {path}: expected a file that can be read, got Permission denied; check the "
        "path and its permissions"
    )
