"""Tiny checkpoints of every family as Hugging Face lays them out, and their plain forward.

Written from the papers and apart from the product: it reads config.json and tensors by name,
computes everything in float64, token by token over a whole sequence, and keeps nothing. On every
checkpoint below it agreed with transformers 5.24 to 2e-5 when it was written.
"""

from __future__ import annotations

import math

import numpy as np

Tensors = dict[str, np.ndarray]

SIZES = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 2.0**-17,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 50.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 20,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 2.0, "beta_slow": 0.5}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.5, 6.0]}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict] = {
    "llama": {"model_type": "llama"},
    "llama-tied-linear": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama-3.1": {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "mixtral": {"model_type": "mixtral", "sliding_window": None, **EXPERTS},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-yarn-windows": {
        "model_type": "qwen2",
        "rope_scaling": YARN,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "qwen3_moe-mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 7,
        "sliding_window": 5,
        "rope_local_base_freq": 20.0,
        "rope_theta": 400.0,
        "query_pre_attn_scalar": 12,
        "tie_word_embeddings": True,
    },
    "gemma3_text-scaled": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 400.0, "factor": 8.0},
        },
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "hidden_size": 32, "sliding_window": 6},
    "phi3-partial": {
        "model_type": "phi3",
        "hidden_size": 32,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "rope_scaling": LONGROPE,
        "sliding_window": None,
    },
}
"""config.json by name, less SIZES and `architectures`."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def config_of(name: str) -> dict:
    """Return the contents of config.json."""
    config = SIZES | CONFIGS[name]
    return config | {"architectures": [ARCHITECTURES[config["model_type"]]]}


def tensors_of(config: dict, seed: int = 11) -> Tensors:
    """Draw a checkpoint's tensors, f32; norms and biases are uneven, so that none is forgotten."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}

    def draw(name: str, *shape: int, norm: bool = False):
        value = rng.standard_normal(shape)
        if norm:
            value = 0.3 * value + (0.0 if _is_gemma(config) else 1.0)
        else:
            value = value / math.sqrt(shape[-1]) * (1.5 if len(shape) > 1 else 1.0)
        tensors[name] = value.astype(np.float32)

    hidden, mlp, head_dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    draw("model.embed_tokens.weight", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        for norm in _layer_norms(config):
            draw(prefix + norm + ".weight", hidden, norm=True)
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        if config["model_type"] == "phi3":
            rows = {"qkv_proj": q_rows + 2 * kv_rows}
        for name, count in rows.items():
            draw(f"{prefix}self_attn.{name}.weight", count, hidden)
            if config.get("attention_bias") or config["model_type"] == "qwen2":
                draw(f"{prefix}self_attn.{name}.bias", count)
        draw(prefix + "self_attn.o_proj.weight", hidden, q_rows)
        if config.get("attention_bias"):
            draw(prefix + "self_attn.o_proj.bias", hidden)
        if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
            draw(prefix + "self_attn.q_norm.weight", head_dim, norm=True)
            draw(prefix + "self_attn.k_norm.weight", head_dim, norm=True)
        moe = _experts(config, index)
        if moe is not None:
            router, expert, (gate, up, down), count, width = moe
            draw(f"{prefix}{router}.weight", count, hidden)
            for number in range(count):
                name = f"{prefix}{expert}.{number}."
                draw(f"{name}{gate}.weight", width, hidden)
                draw(f"{name}{up}.weight", width, hidden)
                draw(f"{name}{down}.weight", hidden, width)
        elif config["model_type"] == "phi3":
            draw(prefix + "mlp.gate_up_proj.weight", 2 * mlp, hidden)
            draw(prefix + "mlp.down_proj.weight", hidden, mlp)
        else:
            for name, shape in {
                "gate_proj": (mlp, hidden),
                "up_proj": (mlp, hidden),
                "down_proj": (hidden, mlp),
            }.items():
                draw(f"{prefix}mlp.{name}.weight", *shape)
                if config.get("mlp_bias"):
                    draw(f"{prefix}mlp.{name}.bias", shape[0])
    draw("model.norm.weight", hidden, norm=True)
    if not config["tie_word_embeddings"]:
        draw("lm_head.weight", config["vocab_size"], hidden)
    return tensors


def logits(config: dict, tensors: Tensors, token_ids) -> np.ndarray:
    """Return the logits after every token of one sequence, [tokens, vocab] f64."""
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    eps = config["rms_norm_eps"]

    def norm(x, name):
        scale = wide[name + ".weight"] + (1 if _is_gemma(config) else 0)
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale

    def linear(x, name):
        return x @ wide[name + ".weight"].T + wide.get(name + ".bias", 0)

    x = wide["model.embed_tokens.weight"][np.asarray(token_ids)]
    if _is_gemma(config):
        x = x * math.sqrt(config["hidden_size"])
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        norms = [prefix + name for name in _layer_norms(config)]
        mixed = _attention(config, index, norm(x, norms[0]), linear, norm, prefix)
        if len(norms) == 4:
            mixed = norm(mixed, norms[1])
        x = x + mixed
        mixed = _mlp(config, index, norm(x, norms[-2 if len(norms) == 4 else -1]), linear, prefix)
        if len(norms) == 4:
            mixed = norm(mixed, norms[3])
        x = x + mixed
    output = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(norm(x, "model.norm"), output)


def _is_gemma(config: dict) -> bool:
    return config["model_type"] == "gemma3_text"


def _layer_norms(config: dict) -> list[str]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if _is_gemma(config):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return names


def _experts(config: dict, index: int):
    """Names and sizes of a layer's experts; None where it has an ordinary MLP."""
    if config["model_type"] == "mixtral":
        names = ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))
        return *names, config["num_local_experts"], config["intermediate_size"]
    if config["model_type"] == "qwen3_moe" and index not in config.get("mlp_only_layers", []):
        names = ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
        return *names, config["num_experts"], config["moe_intermediate_size"]
    return None


def _attention(config, index, x, linear, norm, prefix):
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, tokens = config["head_dim"], len(x)
    prefix += "self_attn."
    if config["model_type"] == "phi3":
        fused = linear(x, prefix + "qkv_proj").reshape(tokens, heads + 2 * kv_heads, head_dim)
        q, k, v = np.split(fused, [heads, heads + kv_heads], axis=1)
    else:
        q, k, v = (
            linear(x, f"{prefix}{name}_proj").reshape(tokens, -1, head_dim) for name in "qkv"
        )
    if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        q, k = norm(q, prefix + "q_norm"), norm(k, prefix + "k_norm")
    turns, factor = frequencies(config, index)
    q, k = (_rotated(part, turns, factor) for part in (q, k))
    scale = config.get("query_pre_attn_scalar", head_dim) ** -0.5
    window = _window(config, index)
    out = np.zeros((tokens, heads, head_dim))
    for head in range(heads):
        shared = head // (heads // kv_heads)
        for token in range(tokens):
            first = 0 if window is None else max(0, token - window + 1)
            scores = k[first : token + 1, shared] @ q[token, head] * scale
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ v[first : token + 1, shared]
    return linear(out.reshape(tokens, -1), prefix + "o_proj")


def _window(config: dict, index: int) -> int | None:
    window, kind = config.get("sliding_window"), config["model_type"]
    if kind == "gemma3_text":
        types = config.get("layer_types")
        slides = types[index] == "sliding_attention" if types else (index + 1) % 6 != 0
        return window if slides else None
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        late = config.get("use_sliding_window") and index >= config["max_window_layers"]
        return window if late else None
    return window


def frequencies(config: dict, index: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair that turns, and what rotated vectors are scaled by."""
    theta, scaling = config["rope_theta"], config.get("rope_scaling") or {}
    if config["model_type"] == "smollm3" and (index + 1) % 4 == 0:
        return np.zeros(config["head_dim"] // 2), 1.0
    if _is_gemma(config):
        slides = _window(config, index) is not None
        if "rope_parameters" in config:
            kind = "sliding_attention" if slides else "full_attention"
            scaling = config["rope_parameters"][kind]
            theta = scaling["rope_theta"]
        elif slides:
            theta = config["rope_local_base_freq"]
    turning = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    plain = np.array([theta ** (-2 * pair / turning) for pair in range(turning // 2)])
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return np.array([_llama3(frequency, scaling) for frequency in plain]), 1.0
    if kind == "yarn":
        return _yarn(plain, theta, turning, scaling), 0.1 * math.log(scaling["factor"]) + 1
    if kind == "longrope":
        longest, original = (
            config["max_position_embeddings"],
            config["original_max_position_embeddings"],
        )
        factor = math.sqrt(1 + math.log(longest / original) / math.log(original))
        return plain / np.array(scaling["long_factor"]), factor
    return plain, 1.0


def _llama3(frequency: float, scaling: dict) -> float:
    wavelength = 2 * math.pi / frequency
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def _yarn(plain: np.ndarray, theta: float, turning: int, scaling: dict) -> np.ndarray:
    original = scaling["original_max_position_embeddings"]

    def dimension(turns):
        return turning * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), turning - 1)
    result = []
    for pair, frequency in enumerate(plain):
        ramp = min(max((pair - low) / max(high - low, 0.001), 0), 1)
        result.append(frequency / scaling["factor"] * ramp + frequency * (1 - ramp))
    return np.array(result)


def _rotated(x: np.ndarray, frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Turn and scale the leading elements of every head, x [tokens, heads, head_dim]."""
    turning = 2 * len(frequencies)
    angles = np.arange(len(x))[:, None, None] * frequencies
    left, right, rest = np.split(x, [turning // 2, turning], axis=-1)
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)


def _mlp(config, index, x, linear, prefix):
    moe = _experts(config, index)
    if moe is not None:
        return _mixture(config, x, linear, prefix, moe)
    prefix += "mlp."
    if config["model_type"] == "phi3":
        gate, up = np.split(linear(x, prefix + "gate_up_proj"), 2, axis=-1)
    else:
        gate, up = linear(x, prefix + "gate_proj"), linear(x, prefix + "up_proj")
    return linear(_activation(config, gate) * up, prefix + "down_proj")


def _activation(config: dict, x: np.ndarray) -> np.ndarray:
    if _is_gemma(config):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def _mixture(config, x, linear, prefix, moe):
    router, expert, (gate, up, down), _, _ = moe
    scores = linear(x, prefix + router)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for token, share in enumerate(shares):
        chosen = sorted(range(len(share)), key=lambda number: -share[number])
        chosen = chosen[: config["num_experts_per_tok"]]
        renormalized = config["model_type"] == "mixtral" or config["norm_topk_prob"]
        total = sum(share[number] for number in chosen) if renormalized else 1.0
        for number in chosen:
            name, row = f"{prefix}{expert}.{number}.", x[token : token + 1]
            inner = _activation(config, linear(row, name + gate)) * linear(row, name + up)
            out[token] += share[number] / total * linear(inner, name + down)[0]
    return out
