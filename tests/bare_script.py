"""Runs the device script in a process that has only jax, numpy and flax."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tomllib

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "device_check.py"
# By jax or flax.
NEEDED = {"jax", "numpy", "flax", "optax", "orbax-checkpoint", "protobuf", "rich", "scipy"}
IMPORTED_AS = {
    "googleapis-common-protos": "google.rpc",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-status": "grpc_status",
    "prometheus-client": "prometheus_client",
}
# Interpreted kernels compile in a third of the time; 0.11 does not know the second flag any more.
XLA_FLAGS = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"

BARE = """
import runpy, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Bare:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        hidden = name in {hidden} and "jaxstate-links-" not in str(spec and spec.origin)
        return None if hidden else spec

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Bare]  # no finder of editable installs
sys.path[:0] = [{folder!r}, {folder!r} + "/device"]
{before}
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    print("imported", sys.modules["jaxstate"].__file__, file=sys.stderr)
"""


def make_importable() -> None:
    """Put the script's folders on sys.path."""
    sys.path[:0] = [str(SCRIPT.parent), str(SCRIPT.parent / "device")]


def hidden() -> set[str]:
    """What the package depends on, less jax, numpy, flax and what they depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {line.split(">")[0].split("=")[0] for line in project["dependencies"]}
    assert names > NEEDED
    return {IMPORTED_AS.get(name, name) for name in names - NEEDED}


def run(*arguments: str, before: str = "", timeout_s: float = 300):
    """Run the script; fast to compile."""
    program = BARE.format(
        hidden=hidden(), folder=str(SCRIPT.parent), script=str(SCRIPT), before=before
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT / "tests",
        env=os.environ | {"XLA_FLAGS": XLA_FLAGS},
    )  # fmt: skip


def lines(text: str) -> list[dict]:
    """Parse JSON lines without words for what is no number."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
