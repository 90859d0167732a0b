"""Tiny models on disk in both formats, written apart from the loaders, and a dense forward."""

from __future__ import annotations

import json
import pathlib

import gguf
import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

from jaxstate import models

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def tiny_config(*, tied: bool = False, linear_factor: float = 1.0) -> models.ModelConfig:
    """Heads wider than the residual stream, grouped queries, a padded vocabulary."""
    scaling = None if linear_factor == 1.0 else models.LinearScaling(factor=linear_factor)
    rope = models.RopeConfig(theta=500.0, scaling=scaling)
    return models.ModelConfig(
        family="llama",
        vocab_size=264,
        hidden_size=32,
        mlp_width=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=2.0**-17,
        max_positions=64,
        layers=(models.LayerConfig(rope=rope),) * 2,
        tied_embeddings=tied,
    )


def tiny_hf_parts() -> tuple[dict, dict[str, np.ndarray]]:
    """Contents of config.json, and tensors, of one tiny model."""
    config = tiny_config()
    return hf_settings(config), hf_tensors(models.init_params(config, seed=2))


def tiny_gguf_parts() -> tuple[dict, dict[str, np.ndarray]]:
    """Metadata and tensors of the same model."""
    config = tiny_config()
    return gguf_metadata(config), gguf_tensors(models.init_params(config, seed=2))


def hf_tensors(params: models.Params) -> dict[str, np.ndarray]:
    """Name and lay out parameters as Hugging Face does: matrices are [outputs, inputs]."""
    tensors = {
        "model.embed_tokens.weight": np.asarray(params["embed"]),
        "model.norm.weight": np.asarray(params["final_norm"]),
    }
    if "lm_head" in params:
        tensors["lm_head.weight"] = np.asarray(params["lm_head"])
    for layer_idx, layer in enumerate(params["layers"]):
        hidden = layer["attn_norm"].shape[0]
        for name, matrix in {
            "self_attn.q_proj": np.asarray(layer["wq"]).reshape(hidden, -1).T,
            "self_attn.k_proj": np.asarray(layer["wk"]).reshape(hidden, -1).T,
            "self_attn.v_proj": np.asarray(layer["wv"]).reshape(hidden, -1).T,
            "self_attn.o_proj": np.asarray(layer["wo"]).reshape(-1, hidden).T,
            "mlp.gate_proj": np.asarray(layer["w_gate"]).T,
            "mlp.up_proj": np.asarray(layer["w_up"]).T,
            "mlp.down_proj": np.asarray(layer["w_down"]).T,
            "input_layernorm": np.asarray(layer["attn_norm"]),
            "post_attention_layernorm": np.asarray(layer["mlp_norm"]),
        }.items():
            tensors[f"model.layers.{layer_idx}.{name}.weight"] = np.ascontiguousarray(matrix)
    return tensors


def hf_settings(config: models.ModelConfig) -> dict:
    """Describe a configuration as config.json does."""
    rope = config.layers[0].rope
    scaling = None
    if rope.scaling is not None:
        scaling = {"rope_type": "linear", "factor": rope.scaling.factor}
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def write_hf_dir(
    directory: pathlib.Path, settings: dict, tensors: dict[str, np.ndarray], *, num_shards: int = 0
) -> pathlib.Path:
    """Write config.json, and the tensors in one file or in shards with an index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    if num_shards == 0:
        safetensors_numpy.save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard_idx in range(num_shards):
        shard = f"model-{shard_idx + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(tensors)[shard_idx::num_shards]
        safetensors_numpy.save_file({name: tensors[name] for name in names}, directory / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def gguf_tensors(params: models.Params) -> dict[str, np.ndarray]:
    """Name and lay out parameters as GGUF files of the llama family do."""
    tensors = {}
    for name, tensor in hf_tensors(params).items():
        for old, new in (
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("model.layers.", "blk."),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            name = name.replace(old, new)
        tensors[name] = tensor
    for layer_idx, layer in enumerate(params["layers"]):
        for kind, leaf in (("q", "wq"), ("k", "wk")):
            name = f"blk.{layer_idx}.attn_{kind}.weight"
            tensors[name] = _interleaved(tensors[name], layer[leaf].shape[1])
    return tensors


def _interleaved(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2i of a head comes from its first half, row 2i + 1 from its second."""
    rows = np.empty_like(matrix)
    head_dim = matrix.shape[0] // num_heads
    for row_idx in range(matrix.shape[0]):
        head_idx, offset = divmod(row_idx, head_dim)
        source = offset // 2 + (offset % 2) * (head_dim // 2)
        rows[row_idx] = matrix[head_idx * head_dim + source]
    return rows


def tiny_tokens() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: three control tokens, all bytes, three merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(hidden))]
    tokens = [*SPECIAL, *alphabet, "Ġa", "Ġab", "11"]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    return tokens, types, ["Ġ a", "Ġa b", "1 1"]


def gguf_metadata(config: models.ModelConfig) -> dict:
    """Describe a configuration and the tiny vocabulary as GGUF metadata does."""
    tokens, types, merges = tiny_tokens()
    rope = config.layers[0].rope
    values = {
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_layers,
        "llama.feed_forward_length": config.mlp_width,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": rope.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if rope.scaling is not None:
        values |= {"llama.rope.scaling.type": "linear"}
        values |= {"llama.rope.scaling.factor": rope.scaling.factor}
    return values


def write_gguf(
    path: pathlib.Path,
    metadata: dict,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    quantized: frozenset[str] = frozenset(),
) -> pathlib.Path:
    """Write a GGUF file; the tensors named in `quantized` as Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_custom_alignment(64)  # where JAX on CPU would use the file's memory if it may
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_tokenizer(*, pre_digits: bool = True) -> dict:
    """The tiny vocabulary as the contents of a tokenizer.json."""
    tokens, types, merges = tiny_tokens()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level["trim_offsets"] = True
    splits = [{"type": "Digits", "individual_digits": True}] if pre_digits else []
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": idx, "content": token, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for idx, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == 3
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: idx for idx, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def assert_bitwise_equal(left: models.Params, right: models.Params) -> None:
    """Compare two parameter trees: structure, dtypes and every bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def without(mapping: dict, key: str) -> dict:
    """Copy a mapping, leaving one key out."""
    return {name: value for name, value in mapping.items() if name != key}
