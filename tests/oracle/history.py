"""The history-true reference: what every token of a context must have computed.

Plain numpy, written apart from the product: f32 products, float64 softmax. A token is computed
once, from the tokens it saw and the distances at which it saw them, and never again: when a
context slides, its kept tokens keep the keys and values they had, and only later tokens see them
closer. A score is q . R(distance) k, with unrotated q and k, so no position is ever stored.

A context is a tuple of record ids; its i-th record stands at position i. Fork, rollback and
sliding are edits of tuples:

    history = History(params, config)
    context = history.extend((), token_ids)
    answer = history.extend(context, question)  # the context itself is unchanged
    context = context[:frozen] + context[frozen + evicted :]
    history.logits(answer[-1])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxstate.models.config import ModelConfig
from jaxstate.models.rope import LinearScaling, RopeConfig

Context = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One computed token.

    Attributes:
      token_id: the token.
      seen: [n] ids of the records it saw, itself last.
      distances: [n] how far behind it each of them stood then, itself 0.
    """

    token_id: int
    seen: np.ndarray
    distances: np.ndarray


class History:
    """A log of computed tokens with their unrotated keys and values, and their logits."""

    def __init__(self, params: dict[str, Any], config: ModelConfig):
        """Start an empty log.

        Args:
          params: tree of `param_specs(config)`; computed with in f32 whatever its dtype.
        """
        self.config = config
        self.log: list[Record] = []
        self._embed = _f32(params["embed"])
        self._output = _f32(params["embed" if config.tied_embeddings else "lm_head"])
        self._final_norm = _f32(params["final_norm"])
        self._layers = [
            {name: _f32(weight) for name, weight in layer.items()} for layer in params["layers"]
        ]
        shape = (0, config.num_layers, config.num_kv_heads, config.head_dim)
        self._keys = _Rows(shape)
        self._values = _Rows(shape)
        self._logits = _Rows((0, config.vocab_size))

    def extend(
        self,
        context: Context,
        token_ids: Sequence[int],
        *,
        position: int | None = None,
        parents: Sequence[int] | None = None,
    ) -> Context:
        """Compute tokens behind a context; returns the new records' ids.

        Args:
          context: ids of the records it consists of, by position.
          position: where the first token stands; by default behind the context. Records at
            greater positions than a token's own are not seen by it.
          parents: index of the token that each one follows, -1 = none of these; a token sees its
            ancestors and stands one behind its parent. By default each follows the one before.
        """
        count = len(token_ids)
        if not count:
            return ()
        parents = range(-1, count - 1) if parents is None else parents
        begin = len(context) if position is None else position
        depths = np.zeros(count, np.int64)
        ancestors = np.eye(count, dtype=bool)
        for index, parent in enumerate(parents):
            if parent >= 0:
                depths[index] = depths[parent] + 1
                ancestors[index] |= ancestors[parent]
        old = np.asarray(context, np.int64)
        new = np.arange(len(self.log), len(self.log) + count)
        records = np.concatenate([old, new])
        positions = begin + depths
        distances = positions[:, None] - np.concatenate([np.arange(len(old)), positions])
        seen = np.concatenate([np.ones((count, len(old)), bool), ancestors], axis=1)
        seen &= distances >= 0
        for index, token_id in enumerate(token_ids):
            order = np.append(np.flatnonzero(seen[index, : len(old) + index]), len(old) + index)
            self.log.append(
                Record(int(token_id), records[order], distances[index, order].astype(np.int32))
            )
        old_keys, old_values = self._keys[old], self._values[old]

        def remembered(layer_idx, keys, values):
            return (
                np.concatenate([old_keys[:, layer_idx], keys]),
                np.concatenate([old_values[:, layer_idx], values]),
            )

        logits, keys, values = self._forward(token_ids, seen, distances, remembered)
        self._keys.append(keys)
        self._values.append(values)
        self._logits.append(logits)
        return tuple(new.tolist())

    def token_ids(self, context: Context) -> list[int]:
        """Return the token of each record."""
        return [self.log[record].token_id for record in context]

    def logits(self, record: int) -> np.ndarray:
        """Return the logits after a record, [vocab] f32."""
        return self._logits[record]

    def keys_at(self, context: Context, positions: np.ndarray) -> np.ndarray:
        """Return records' keys rotated at given positions, [records, layers, kv_heads, D]."""
        keys = self._keys[np.asarray(context, np.int64)]
        turned = np.empty_like(keys)
        for layer_idx, layer in enumerate(self.config.layers):
            turns = _turns(np.asarray(positions), layer.rope, self.config.head_dim)
            turned[:, layer_idx] = _to_real(_to_complex(keys[:, layer_idx]) * turns[:, None])
        return turned

    def values(self, context: Context) -> np.ndarray:
        """Return records' values, [records, layers, kv_heads, head_dim]."""
        return self._values[np.asarray(context, np.int64)]

    def replay(self) -> np.ndarray:
        """Compute the whole log again from what it says was seen, without anything remembered.

        One dense pass over all records: [records, vocab] f32, to compare with `logits`.
        """
        count = len(self.log)
        seen = np.zeros((count, count), bool)
        distances = np.zeros((count, count), np.int64)
        for index, record in enumerate(self.log):
            seen[index, record.seen] = True
            distances[index, record.seen] = record.distances
        token_ids = [record.token_id for record in self.log]
        return self._forward(token_ids, seen, distances, lambda _, k, v: (k, v))[0]

    def _forward(self, token_ids, seen, distances, columns):
        """Run the decoder: logits [new, vocab], and k, v [new, layers, kv_heads, head_dim].

        Args:
          seen, distances: [new, columns] of the score matrix.
          columns: (layer index, new k, new v) to the k, v of all columns.
        """
        config, eps = self.config, self.config.rms_norm_eps
        x = self._embed[np.asarray(token_ids, np.int64)] * np.float32(config.embed_scale)
        all_keys, all_values = [], []
        for layer_idx, (layer, weights) in enumerate(zip(config.layers, self._layers, strict=True)):
            normed = _rms_norm(x, weights["attn_norm"], eps)
            q, k, v = (_product(normed, weights[f"w{n}"]) + weights.get(f"b{n}", 0) for n in "qkv")
            if config.qk_norm:
                q = _rms_norm(q, weights["q_norm"], eps)
                k = _rms_norm(k, weights["k_norm"], eps)
            all_keys.append(k)
            all_values.append(v)
            visible = seen if layer.window is None else seen & (distances < layer.window)
            q = q * np.float32(config.query_scale)
            mixed = _attend(q, *columns(layer_idx, k, v), visible, distances, layer.rope)
            mixed = _product(mixed.reshape(len(x), -1), _flat(weights["wo"])) + weights.get("bo", 0)
            if config.post_norms:
                mixed = _rms_norm(mixed, weights["post_attn_norm"], eps)
            x = x + mixed
            normed = _rms_norm(x, weights["mlp_norm"], eps)
            mixed = (_mixture if layer.routed else _mlp)(config, normed, weights)
            if config.post_norms:
                mixed = _rms_norm(mixed, weights["post_mlp_norm"], eps)
            x = x + mixed
        logits = _rms_norm(x, self._final_norm, eps) @ self._output.T
        return logits, np.stack(all_keys, axis=1), np.stack(all_values, axis=1)


class _Rows:
    """An array that grows along its first axis."""

    def __init__(self, shape: tuple[int, ...]):
        self._array = np.empty((64, *shape[1:]), np.float32)
        self._count = 0

    def append(self, rows: np.ndarray) -> None:
        count = self._count + len(rows)
        if count > len(self._array):
            grown = np.empty((2 * count, *self._array.shape[1:]), np.float32)
            grown[: self._count] = self._array[: self._count]
            self._array = grown
        self._array[self._count : count] = rows
        self._count = count

    def __getitem__(self, index) -> np.ndarray:
        return self._array[: self._count][index]


def _attend(q, k, v, visible, distances, rope: RopeConfig) -> np.ndarray:
    """Mix values by the softmax of q . R(distance) k / sqrt(head_dim).

    Args:
      q: [new, heads, head_dim].  k, v: [columns, kv_heads, head_dim].  None of them rotated.
      visible, distances: [new, columns].
    """
    new, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    turns = _turns(distances, rope, head_dim)  # [new, columns, head_dim / 2]
    wide_q = _to_complex(q).reshape(new, kv_heads, heads // kv_heads, head_dim // 2)
    turned = np.conj(_to_complex(k))[None] * turns[:, :, None]
    # Rotating q by a and k by b leaves q . conj(k) e^{i (a - b)}: only the distance counts.
    scores = np.einsum("QGND,QKGD->QGNK", wide_q, turned).real / np.sqrt(head_dim)
    scores = np.where(visible[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("QGNK,KGD->QGND", weights, v.astype(np.float64))
    return mixed.reshape(new, heads, head_dim).astype(np.float32)


def _turns(positions: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return e^{i position frequency}, [..., head_dim / 2]."""
    turning = head_dim if rope.rotary_dim is None else rope.rotary_dim
    frequencies = np.zeros(head_dim // 2)
    for pair in range(turning // 2):
        frequencies[pair] = rope.theta ** (-2 * pair / turning)
    if rope.scaling is not None:
        assert isinstance(rope.scaling, LinearScaling), "the reference knows no other scaling"
        frequencies /= rope.scaling.factor
    return np.exp(1j * positions[..., None] * frequencies)


def _to_complex(x: np.ndarray) -> np.ndarray:
    """Pair element i with element i + head_dim / 2."""
    half = x.shape[-1] // 2
    return x[..., :half].astype(np.float64) + 1j * x[..., half:]


def _to_real(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x.real, x.imag], axis=-1)


def _mlp(config: ModelConfig, x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    gate = _product(x, weights["w_gate"]) + weights.get("b_gate", 0)
    up = _product(x, weights["w_up"]) + weights.get("b_up", 0)
    return _product(_activation(config, gate) * up, weights["w_down"]) + weights.get("b_down", 0)


def _mixture(config: ModelConfig, x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Send every token alone through the experts with the highest scores."""
    experts = config.experts
    assert experts is not None
    scores = _product(x, weights["router"]).astype(np.float64)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for token, share in enumerate(shares):
        chosen = np.argsort(-share, kind="stable")[: experts.per_token]
        total = share[chosen].sum() if experts.normalize else 1.0
        for expert in chosen:
            gate = x[token] @ weights["experts_gate"][expert]
            inner = _activation(config, gate) * (x[token] @ weights["experts_up"][expert])
            out[token] += np.float32(share[expert] / total) * (
                inner @ weights["experts_down"][expert]
            )
    return out


def _activation(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    if config.activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def _rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    mean = np.mean(np.square(x.astype(np.float64)), axis=-1, keepdims=True)
    return (x / np.sqrt(mean + eps)).astype(np.float32) * scale


def _product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [tokens, inputs] on weight [inputs, ...]: [tokens, ...] f32."""
    return (x @ weight.reshape(len(weight), -1)).reshape(len(x), *weight.shape[1:])


def _flat(weight: np.ndarray) -> np.ndarray:
    """[heads, head_dim, hidden] -> [heads * head_dim, hidden]."""
    return weight.reshape(-1, weight.shape[-1])


def _f32(weight) -> np.ndarray:
    return np.asarray(weight).astype(np.float32)
