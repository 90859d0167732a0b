"""Memory while weights are loaded: pages go, copies are not made, the peak is bounded."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest

from jaxstate import models
from jaxstate.models import host_memory

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

PEAK_PROGRAM = """
import pathlib, sys
import jax
from jaxstate import models

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

models.load_safetensors(sys.argv[1])  # memory that loading takes once, whatever the size
before = status("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
_, params = models.load_safetensors(sys.argv[2])
jax.block_until_ready(params)
print(status("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def _resident_file_bytes() -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


@linux_only
def test_released_pages_are_not_resident_and_read_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (1 << 16))  # 16 MiB
    content = np.memmap(path, np.uint8, "r")
    before = _resident_file_bytes()
    view, total = content[1000:2000], int(content.sum(dtype=np.int64))
    assert _resident_file_bytes() - before > 15 << 20
    host_memory.release(content)
    assert _resident_file_bytes() - before < 1 << 20
    assert view.tobytes() == path.read_bytes()[1000:2000]
    assert int(content.sum(dtype=np.int64)) == total


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_placed_values_are_cast_made_contiguous_and_their_own(dtype):
    values = np.random.default_rng(0).standard_normal((6, 8, 4), np.float32)
    turned = values.transpose(2, 0, 1)
    placed = host_memory.place(turned, dtype, name="x")
    expected = np.array(turned).astype(dtype)
    assert placed.dtype == dtype and placed.shape == (4, 6, 8)
    values[:] = 0
    np.testing.assert_array_equal(np.asarray(placed), expected)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3.4e38])  # the last one in bf16
def test_what_is_not_finite_is_refused_wherever_it_is(wrong):
    values = np.zeros((3, 1 << 17), np.float32)
    for index in ((0, 0), (1, 70_000), (2, -1)):
        values[index] = wrong
        with pytest.raises(ValueError, match="a.b: expected finite numbers, got NaN or infinity"):
            host_memory.place(values, jnp.bfloat16, name="a.b")
        values[index] = 0


def test_placing_makes_one_copy_only(monkeypatch):
    buffers = []
    put = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda array, *to: buffers.append(array) or put(array, *to)
    )
    placed = host_memory.place(np.ones((128, 128), np.float32), np.float32, name="x")
    assert placed.unsafe_buffer_pointer() == buffers[0].ctypes.data


@linux_only
def test_peak_is_at_most_what_is_kept_and_one_and_a_fifth_of_the_largest_shard(tmp_path):
    small = model_files.write_hf_dir(tmp_path / "small", *model_files.tiny_hf_parts())
    config = dataclasses.replace(
        model_files.tiny_config(), vocab_size=4096, hidden_size=1024, mlp_width=2816,
        layers=model_files.tiny_config().layers * 2,
    )  # fmt: skip
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, jnp.bfloat16),
                          models.abstract_params(config))  # fmt: skip
    large = model_files.write_hf_dir(
        tmp_path / "large", model_files.hf_settings(config), model_files.hf_tensors(params),
        num_shards=4,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PEAK_PROGRAM, str(small), str(large)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    rise, kept = map(int, done.stdout.split())
    largest = max(path.stat().st_size for path in large.glob("*.safetensors"))
    assert kept == 4 * models.num_params(config) > 3 * largest
    assert kept <= rise <= kept + 1.2 * largest
