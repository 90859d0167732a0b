"""The tiny checkpoints of plain_models as GGUF files lay them out, after llama.cpp's converter."""

from __future__ import annotations

import numpy as np
import plain_models

CONVERTIBLE: dict[str, dict] = {
    "llama": {},
    "llama-tied-linear": {},
    "llama-3.1": {},
    "llama-biases": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma3_text": {"rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 8},
    "smollm3": {},
    "phi3": {},
    "phi3-partial": {},
}
"""Names of plain_models.CONFIGS that GGUF can say, with what it must take for granted."""

_ARCHITECTURES = {
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
_NAMES = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("block_sparse_moe.gate.", "ffn_gate_inp."),
    ("mlp.gate.", "ffn_gate_inp."),
)
_EXPERTS = {
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}


def architecture_of(config: dict) -> str:
    """Return `general.architecture`."""
    return _ARCHITECTURES.get(config["model_type"], config["model_type"])


def tensors_of(config: dict, tensors: plain_models.Tensors) -> plain_models.Tensors:
    """Rename and lay out a checkpoint's tensors."""
    architecture = architecture_of(config)
    converted: plain_models.Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            tensor = _interleaved(tensor, config["head_dim"])
        if ".experts." in name:
            layer, part = name.split(".")[2], name.split(".")[-2]
            stacks.setdefault(f"blk.{layer}.{_EXPERTS[part]}.weight", []).append(tensor)
            continue
        converted[_renamed(name, architecture)] = tensor
    converted |= {name: np.stack(parts) for name, parts in stacks.items()}
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        plain = config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
        scaled, _ = plain_models.frequencies(config, 0)
        converted["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    if scaling.get("type") == "longrope":
        for kind in ("long", "short"):
            table = np.array(scaling[f"{kind}_factor"], np.float32)
            converted[f"rope_factors_{kind}.weight"] = table
    return converted


def metadata_of(config: dict) -> dict:
    """Describe a configuration; what llama.cpp leaves out is left out."""
    prefix = architecture_of(config) + "."
    scaling = config.get("rope_scaling") or {}
    turning = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    values = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": turning,
        "rope.freq_base": config["rope_theta"],
    }
    if config["model_type"] in ("gemma3_text", "phi3"):
        values["attention.sliding_window"] = config["sliding_window"] or 0
    if scaling.get("type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    if scaling.get("type") == "longrope":
        original = config["original_max_position_embeddings"]
        factor = np.sqrt(
            1 + np.log(config["max_position_embeddings"] / original) / np.log(original)
        )
        values["rope.scaling.original_context_length"] = original
        values["rope.scaling.attn_factor"] = float(factor)
    if config["model_type"] == "mixtral":
        values["expert_count"] = config["num_local_experts"]
        values["expert_used_count"] = config["num_experts_per_tok"]
    if config["model_type"] == "qwen3_moe":
        values["expert_count"] = config["num_experts"]
        values["expert_used_count"] = config["num_experts_per_tok"]
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {prefix + key: value for key, value in values.items()}


def _renamed(name: str, architecture: str) -> str:
    if architecture == "gemma3":
        name = name.replace("post_attention_layernorm", "post_attention_norm")
    for old, new in (*_NAMES, ("post_attention_layernorm", "ffn_norm")):
        name = name.replace(old, new)
    return name


def _interleaved(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Row 2i of a head comes from its first half, row 2i + 1 from its second."""
    order = np.stack([np.arange(head_dim // 2), np.arange(head_dim // 2, head_dim)], axis=1)
    heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
    return heads[:, order.reshape(-1)].reshape(tensor.shape)
