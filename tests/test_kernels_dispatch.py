"""What happens when the CPU kernel cannot be built."""

from __future__ import annotations

import logging

import jax.numpy as jnp
import pytest

from jaxstate.kernels_pallas import attention_cpu, cpu_library, dispatch


@pytest.fixture
def broken_compiler(monkeypatch):
    if attention_cpu.unsupported(64, jnp.float32):
        pytest.skip(str(attention_cpu.unsupported(64, jnp.float32)))
    monkeypatch.setattr(cpu_library, "FLAGS", ("--no-such-flag",))


def test_auto_warns_and_takes_plain_xla(broken_compiler, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert dispatch.choose("auto", 64, jnp.float32, tmp_path) == "xla"
    assert "compiling attention_cpu.cc failed" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_named_kernel_that_does_not_build_is_an_error(broken_compiler, tmp_path):
    with pytest.raises(RuntimeError, match="compiling attention_cpu.cc failed"):
        dispatch.choose("cpu", 64, jnp.float32, tmp_path)
