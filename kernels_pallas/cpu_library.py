"""Kernels for CPUs: compiled once with the machine's C++ compiler, and registered with JAX."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import pathlib
import shutil
import subprocess
import tempfile

import jax

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")


def unsupported() -> str | None:
    """Say why no such kernel can run here, None if they can."""
    if jax.default_backend() != "cpu":
        return f"it runs on the CPU backend, this is {jax.default_backend()}"
    if _compiler() is None:
        return "no C++ compiler was found (c++, g++ or clang++ on PATH)"
    return None


@functools.cache
def build(source: pathlib.Path, symbol: str, target: str, cache_dir: pathlib.Path) -> None:
    """Compile a source once per machine, and register what it exports with JAX.

    Args:
      symbol: exported by the source, a handler of XLA's foreign function interface.
      target: the name under which `jax.ffi.ffi_call` finds it.
      cache_dir: where compiled libraries are kept.
    Raises:
      RuntimeError: there is no compiler, or it failed; carries its message.
    """
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(f"{source.name} needs a C++ compiler; install g++ or choose xla")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = (*texts, " ".join(FLAGS), version.stdout, jax.__version__, _cpu_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_dir / f"{source.stem}-{key}.so"
    if not library.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as directory:
            made = pathlib.Path(directory) / library.name
            include = f"-I{jax.ffi.include_dir()}"
            command = [compiler, *FLAGS, include, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"compiling {source.name} failed: {done.stderr.strip()[-2000:]}")
            made.replace(library)
        logger.info("compiled %s into %s", source.name, library)
    handler = getattr(ctypes.CDLL(str(library)), symbol)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


def _compiler() -> str | None:
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next((path for path in found if path), None)


def _cpu_flags() -> str:
    """What the processor can do: -march=native must not travel to a lesser one."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return ""
    lines = info.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
