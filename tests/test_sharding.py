"""Engines over several devices compute what one device computes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

PROGRAM = pathlib.Path(__file__).parent / "sharded_engine.py"
TOLERANCE = 1e-3  # DESIGN rule of equality across device counts, f32


def _converse(name: str, implementation: str) -> list[dict]:
    """Return what the program found on no mesh and on 1, 2 and 8 devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", str(PROGRAM), name, implementation],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _assert_equal(found: list[dict]) -> None:
    single = found[0]
    assert [one["devices"] for one in found] == [1, 1, 2, 8]
    for one in found[1:]:
        assert one["ids"] == single["ids"]
        for key in ("logprobs", "choices"):
            np.testing.assert_allclose(one[key], single[key], atol=TOLERANCE, rtol=0)


def _case(name: str, implementation: str, split: str, kv_heads: list[int], *marks):
    return pytest.param(name, implementation, split, kv_heads, marks=marks)


@pytest.mark.parametrize(
    "name, implementation, split, kv_heads",
    [
        _case("kv heads split", "auto", "heads kv_heads mlp vocab", [8, 8, 4, 1]),
        _case("queries split", "auto", "heads mlp vocab", [2, 2, 1, 2]),
        _case("queries split", "xla", "heads mlp vocab", [2, 2, 1, 2], pytest.mark.long),
        _case("kv heads split", "xla", "heads kv_heads mlp vocab", [8, 8, 4, 1], pytest.mark.long),
        _case("experts", "xla", "heads kv_heads mlp vocab", [8, 8, 4, 1], pytest.mark.long),
        _case("nothing split", "xla", "vocab", [3, 3, 3, 3], pytest.mark.long),
    ],
)
def test_conversation_on_a_mesh_equals_that_on_one_device(name, implementation, split, kv_heads):
    found = _converse(name, implementation)
    _assert_equal(found)
    assert found[-1]["split"] == split.split()
    assert [one["kv_heads_per_device"] for one in found] == kv_heads


@pytest.mark.long
def test_smollm2_on_a_mesh_equals_that_on_one_device(smollm2_path):
    """Three key/value heads and nine query heads divide neither by two nor by eight."""
    found = _converse(str(smollm2_path), "auto")
    _assert_equal(found)
    assert found[-1]["split"] == ["mlp", "vocab"]
