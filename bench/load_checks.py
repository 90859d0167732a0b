"""Bars of loading: how much memory it takes at its peak, and how long until the first token."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import common
import jax
import ml_dtypes
import numpy as np
from common import Limit, Report
from safetensors import numpy as safetensors_numpy

from jaxstate.models import checkpoint, gguf_loader, loading, safetensors_loader, sources
from jaxstate.models.config import DtypePolicy
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.params import Params

MODEL = "smollm2-135m"
ROUNDS = 5
PROMPT = "The capital of France is"
SHARDS = 4
LAYERS = 12
SMALL, LARGE = 32, 1024  # hidden sizes

PEAK = Limit(op="<=", value=1.0)
FIRST_TOKEN = Limit(op="<=", value=6.0)
PEAK_UNIT = "x (1.2 x largest shard + weights kept)"


def bars(report: Report, *, quick: bool) -> None:
    """Measure both bars; takes a minute, a quarter of it if `quick`."""
    peak_memory(report)
    first_token(report, rounds=1 if quick else ROUNDS)


def peak_memory(report: Report) -> None:
    """Load a generated sharded checkpoint and a GGUF file, each in a fresh process."""
    if not pathlib.Path("/proc/self/clear_refs").exists():
        reason = "the peak of a process's memory can be reset on Linux only"
        report.no_bar("load.peak_memory", PEAK, unit=PEAK_UNIT, reason=reason)
        return
    gguf = sources.pull(MODEL)
    cases = {}
    with tempfile.TemporaryDirectory() as root:
        small = write_checkpoint(pathlib.Path(root) / "small", SMALL)
        large = write_checkpoint(pathlib.Path(root) / "large", LARGE)
        for path in (large, gguf):
            for dtype in ("float32", "bfloat16"):
                common.note(f"peak memory of loading {path.name} as {dtype}")
                cases[f"{path.name} {dtype}"] = _in_fresh_process(small, path, dtype)
    report.bar(
        "load.peak_memory", max(case["of_bound"] for case in cases.values()), PEAK,
        unit=PEAK_UNIT, n=len(cases), cases=cases,
    )


def _in_fresh_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--peak-probe", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_probe(small: pathlib.Path, path: pathlib.Path, dtype: str) -> dict[str, Any]:
    """Load weights where nothing else is going on; run in a fresh process.

    Args:
      small: a model to load first, for memory that loading takes once whatever the size.
    """
    _load_weights(small, dtype)
    before = _status_bytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    began = time.perf_counter()
    params, files = _load_weights(path, dtype)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - began
    rise = _status_bytes("VmHWM") - before
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    shard = max(file.stat().st_size for file in files)
    return {
        "of_bound": rise / (1.2 * shard + kept), "rise_mb": rise / 1e6, "kept_mb": kept / 1e6,
        "largest_shard_mb": shard / 1e6, "load_s": seconds,
    }


def _load_weights(path: pathlib.Path, dtype: str) -> tuple[Params, Sequence[pathlib.Path]]:
    dtypes = DtypePolicy.named(dtype)
    if path.is_dir():
        _, params = safetensors_loader.load_safetensors(path, dtypes=dtypes)
        return params, safetensors_loader.weight_files(path)
    file = GgufFile(path)
    return gguf_loader.load_gguf(file, dtypes=dtypes)[1], file.paths


def _status_bytes(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status: expected {name}, got none; run on Linux")


def first_token(report: Report, *, rounds: int) -> None:
    """Time `jaxstate ask` from the start of its process to its first token.

    Beside it, in this process, how long it takes to read the same weights from a GGUF file and
    from a checkpoint.
    """
    gguf = sources.pull(MODEL)
    with tempfile.TemporaryDirectory() as root:
        cache = pathlib.Path(root)
        (cache / "models").mkdir()
        (cache / "models" / gguf.name).symlink_to(gguf)
        _ask_s(cache)  # fills the caches of compiled programs
        load = common.OtherLoad(list)
        samples = [_ask_s(cache) for _ in range(rounds)]
        load.end("asking")
        checkpoint.save_checkpoint(cache / "saved", loading.load(gguf))
        reads = {
            name: common.milliseconds(lambda path=path: loading.load(path)) / 1e3
            for name, path in (("gguf", gguf), ("checkpoint", cache / "saved"))
        }
    report.bar(
        "load.first_token_s", common.median(samples), FIRST_TOKEN,
        unit="s from process start, warm compile cache", n=rounds,
        spoiled=load.reason("asking"), samples_s=samples, reads_s=reads,
    )


def _ask_s(cache: pathlib.Path) -> float:
    program = "import sys; from jaxstate.serving import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", program, "ask", "--model", MODEL, "--cache-dir", str(cache)]
    command += ["--prompt", PROMPT, "--raw", "--max-new-tokens", "4"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if not first or process.returncode:
        raise RuntimeError(f"jaxstate ask: expected an answer, got status {process.returncode}")
    return seconds


def write_checkpoint(directory: pathlib.Path, hidden_size: int) -> pathlib.Path:
    """Write random weights of the Llama family in bf16, in shards as Hugging Face cuts them."""
    heads, mlp_width, vocab_size = 16, hidden_size * 11 // 4, 31 * hidden_size
    head_dim = hidden_size // heads
    matrices = {
        "self_attn.q_proj": (hidden_size, hidden_size),
        "self_attn.k_proj": (4 * head_dim, hidden_size),
        "self_attn.v_proj": (4 * head_dim, hidden_size),
        "self_attn.o_proj": (hidden_size, hidden_size),
        "mlp.gate_proj": (mlp_width, hidden_size),
        "mlp.up_proj": (mlp_width, hidden_size),
        "mlp.down_proj": (hidden_size, mlp_width),
        "input_layernorm": (hidden_size,),
        "post_attention_layernorm": (hidden_size,),
    }
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    directory.mkdir()
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        shapes = {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS)
            for name, shape in matrices.items()
        }
        if shard == 0:
            shapes["model.embed_tokens.weight"] = (vocab_size, hidden_size)
        if shard == SHARDS - 1:
            shapes["model.norm.weight"] = (hidden_size,)
            shapes["lm_head.weight"] = (vocab_size, hidden_size)
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        tensors = {tensor: draw(shape) for tensor, shape in shapes.items()}
        safetensors_numpy.save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size,
        "hidden_size": hidden_size, "intermediate_size": mlp_width, "num_hidden_layers": LAYERS,
        "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": head_dim,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 1e4,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def main() -> None:
    """Measure one case in this process, or both bars."""
    parser = argparse.ArgumentParser(description="Loading: peak memory, time to the first token.")
    parser.add_argument("--peak-probe", nargs=3, metavar=("SMALL", "PATH", "DTYPE"))
    args = parser.parse_args()
    if args.peak_probe:
        small, path, dtype = args.peak_probe
        print(json.dumps(peak_probe(pathlib.Path(small), pathlib.Path(path), dtype)))
        return
    report = Report("load", command="python bench/load_checks.py", quick=False, path=None)
    bars(report, quick=False)
    report.table()


if __name__ == "__main__":
    main()
