"""Fixtures shared by the tests."""

from __future__ import annotations

import pathlib

import pytest

from jaxstate import models
from jaxstate.models import sources


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The real weights of smollm2-135m, fetched once into the user's cache."""
    return sources.pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_model(smollm2_path: pathlib.Path) -> models.LoadedModel:
    """The real model in f32; tests must not donate its weights."""
    return models.load(smollm2_path)
