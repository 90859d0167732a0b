"""The floor under every latency, counted by hand."""

from __future__ import annotations

import dataclasses

import model_files
import pytest

from jaxstate.serving import machine


def _matrix_flops() -> int:
    # A layer: q and o 32x64, k and v 32x32, three of 32x64 in the MLP, and two norms of 32.
    return 2 * (2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_one_token_without_context(tied):
    config = model_files.tiny_config(tied=tied)
    attention = 4 * 1 * 4 * 16 * 2  # sees itself
    expected = _matrix_flops() + attention + 2 * 264 * 32
    assert machine.forward_flops(config, 0, 1) == expected


def test_every_token_adds_a_cell_to_see():
    config = model_files.tiny_config()
    seen = (10 + 1) + (10 + 2) + (10 + 3)
    expected = 3 * _matrix_flops() + 4 * seen * 4 * 16 * 2 + 2 * 264 * 32
    assert machine.forward_flops(config, 10, 3) == expected


def test_an_input_embedding_of_its_own_is_not_read():
    tied, untied = model_files.tiny_config(tied=True), model_files.tiny_config()
    assert machine.weights_read_bytes(tied) == machine.weights_bytes(tied)
    assert machine.weights_read_bytes(untied) == machine.weights_read_bytes(tied)
    assert machine.weights_bytes(untied) - machine.weights_bytes(tied) == 264 * 32 * 4


def test_floor_is_the_larger_of_reading_and_computing():
    config = model_files.tiny_config(tied=True)
    slow_memory = machine.Machine(name="m", read_bytes_per_s=10.0, flops_per_s=1e30)
    cells = 7 * 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width, f32
    expected = (machine.weights_bytes(config) + cells) / 10.0
    assert slow_memory.floor_s(config, 7, 1) == pytest.approx(expected)
    slow_units = dataclasses.replace(slow_memory, read_bytes_per_s=1e30, flops_per_s=5.0)
    expected = machine.forward_flops(config, 7, 1) / 5.0
    assert slow_units.floor_s(config, 7, 1) == pytest.approx(expected)


def test_measured_rates_are_those_of_a_real_machine():
    found = machine.measure()
    assert found.name
    assert 1e8 < found.read_bytes_per_s < 1e14
    assert 1e9 < found.flops_per_s < 1e16
