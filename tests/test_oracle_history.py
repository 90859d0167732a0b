"""The history-true reference against itself and against plain dense forwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import tiny
from oracle.history import History

from jaxstate import models


def _tokens(rng: np.random.Generator, setup: tiny.Setup, count: int) -> list[int]:
    return rng.integers(0, setup.model.vocab_size, count).tolist()


def _logits(history: History, context) -> np.ndarray:
    return np.stack([history.logits(record) for record in context])


def _dense(setup: tiny.Setup, token_ids) -> np.ndarray:
    """Plain causal attention at absolute positions, windows included; the product's decoder."""
    config = setup.model
    positions = jnp.arange(len(token_ids), dtype=jnp.int32)
    distance = positions[:, None] - positions

    def attend(layer_idx, q, k, v, state):
        layer = config.layers[layer_idx]
        frequencies = jnp.asarray(layer.rope.inverse_frequencies(config.head_dim))
        q = models.rotate(q, positions, frequencies)
        k = models.rotate(k, positions, frequencies)
        k = jnp.repeat(k, config.heads_per_kv_head, axis=1)
        v = jnp.repeat(v, config.heads_per_kv_head, axis=1)
        window = len(token_ids) if layer.window is None else layer.window
        scores = jnp.einsum("QND,KND->NQK", q, k, precision="highest") * config.head_dim**-0.5
        scores = jnp.where((distance >= 0) & (distance < window), scores, -jnp.inf)
        return jnp.einsum("NQK,KND->QND", jax.nn.softmax(scores), v, precision="highest"), state

    ids = jnp.asarray(token_ids, jnp.int32)
    states = (None,) * config.num_layers
    hidden, _ = models.forward(tiny.params_of(setup), config, ids, attend, states)
    return np.asarray(models.logits(tiny.params_of(setup), config, hidden))


@pytest.mark.parametrize("setup", [tiny.GROUPED, tiny.WINDOWED], ids=lambda setup: setup.name)
def test_history_without_eviction_equals_dense_forward(setup: tiny.Setup):
    rng = np.random.default_rng(0)
    token_ids = _tokens(rng, setup, 50)
    history = History(tiny.params_of(setup), setup.model)
    context = ()
    while len(context) < len(token_ids):
        chunk = token_ids[len(context) :][: int(rng.integers(1, 9))]
        context += history.extend(context, chunk)
    got = _logits(history, context)
    np.testing.assert_allclose(got, _dense(setup, token_ids), atol=1e-4, rtol=0)
    if setup is tiny.GROUPED:
        plain = models.plain_forward.logits(
            tiny.params_of(setup), setup.model, jnp.asarray(token_ids, jnp.int32)
        )
        np.testing.assert_allclose(got, np.asarray(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("setup", [tiny.GROUPED, tiny.WINDOWED], ids=lambda setup: setup.name)
def test_history_of_slid_contexts_replays_from_its_log(setup: tiny.Setup):
    rng = np.random.default_rng(1)
    history = History(tiny.params_of(setup), setup.model)
    context = history.extend((), _tokens(rng, setup, 6))
    for _ in range(8):
        context += history.extend(context, _tokens(rng, setup, 5))
        history.extend(context, _tokens(rng, setup, 3))
        context = context[:2] + context[2 + int(rng.integers(0, 5)) :]
    tree = history.extend(context, _tokens(rng, setup, 5), parents=[-1, 0, 0, 2, -1])
    history.extend(context, _tokens(rng, setup, 2), position=len(context) // 2)
    np.testing.assert_allclose(
        history.replay(), _logits(history, range(len(history.log))), atol=1e-4, rtol=0
    )
    assert set(tree[:3]) - set(history.log[tree[3]].seen) == {tree[1]}


def test_history_of_tree_equals_history_of_its_paths():
    history = History(tiny.params_of(tiny.WINDOWED), tiny.WINDOWED.model)
    context = history.extend((), [3, 1, 4, 1, 5, 9, 2, 6])
    tree = history.extend(context, [5, 3, 5, 8], parents=[-1, 0, 0, 2])
    path = history.extend(context, [5, 5, 8])
    np.testing.assert_allclose(
        _logits(history, [tree[index] for index in (0, 2, 3)]),
        _logits(history, path),
        atol=1e-5,
        rtol=0,
    )


def test_history_sliding_keeps_what_was_computed_and_differs_from_a_fresh_prefill():
    setup = tiny.GROUPED
    rng = np.random.default_rng(2)
    history = History(tiny.params_of(setup), setup.model)
    context = history.extend((), _tokens(rng, setup, 40))
    before = history.values(context)
    slid = context[:4] + context[20:]
    question = _tokens(rng, setup, 3)
    after_slide = history.logits(history.extend(slid, question)[-1])
    fresh = history.extend((), history.token_ids(slid))
    after_fresh = history.logits(history.extend(fresh, question)[-1])
    np.testing.assert_array_equal(history.values(context), before)
    assert np.abs(after_slide - after_fresh).max() > 0.1
    assert history.log[slid[-1]].distances[0] == 39  # as computed, not as it stands now
