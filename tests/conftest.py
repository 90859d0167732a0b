"""Fixtures shared by the tests."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile

import pytest

# What one file has compiled others need, too: processes of one run share it, and nothing else does.
_OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _OWN_CACHE:  # before JAX is imported
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxstate-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

from jaxstate import models  # noqa: E402
from jaxstate.models import sources  # noqa: E402


def pytest_unconfigure() -> None:
    """Remove what was compiled; of several processes the first one does."""
    if _OWN_CACHE:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The real weights of smollm2-135m, fetched once into the user's cache."""
    return sources.pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_model(smollm2_path: pathlib.Path) -> models.LoadedModel:
    """The real model in f32; tests must not donate its weights."""
    return models.load(smollm2_path)
