"""The task's model as an nnx.Module, and its loss over contexts with many questions each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from task import candles, tokenizer

from jaxstate.models import decoder, layers
from jaxstate.models.config import LayerConfig, ModelConfig
from jaxstate.models.params import Params, init_params
from jaxstate.models.rope import RopeConfig

ROW_WEIGHT = 0.2
# A quarter of each head turns with positions, the rest matches what is named, wherever it stands.
# The first layer sees a name with open and close before it, what has to be put together first;
# of the first row also what stands before that.
_ROPE = RopeConfig(theta=1e3, rotary_dim=16)
_LAYERS = (LayerConfig(rope=_ROPE, window=9), *(LayerConfig(rope=_ROPE),) * 2)
CONFIG = ModelConfig(
    family="llama",
    vocab_size=len(tokenizer.tokens()),
    hidden_size=128,
    mlp_width=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_positions=8192,
    layers=_LAYERS,
    tied_embeddings=False,
)


def first_params(seed: int) -> Params:
    """Draw the weights that training starts from.

    A token's embedding is the sum of its parts': where it stands in a word, its letter or digit,
    and what all tokens share, which attention by position alone needs. So a row's name looks
    like its name in a question, and a digit is a number from the start.
    """
    rng = np.random.default_rng(seed)
    parts: dict[str, np.ndarray] = {}

    def part(name: str) -> np.ndarray:
        if name not in parts:
            parts[name] = rng.standard_normal(CONFIG.hidden_size).astype(np.float32)
        return parts[name]

    rows = []
    for token in tokenizer.tokens():
        row = part("all") + 0.3 * rng.standard_normal(CONFIG.hidden_size).astype(np.float32)
        if token.endswith("?"):
            row += 2 * part("?")
        before, last = token.rstrip("?")[:-1], token.rstrip("?")[-1]
        if last.isdigit():
            place = before[:1].replace("\n", " ")  # first, second or third digit of a price
            row += part(f"{place}digit") + part(before) + part(last)
            row += part(f"{place}size") * (int(last) - 4.5) / 2
        elif last in candles.LETTERS:
            row += part(f"{before}letter") + 2 * part(f"{before}{last}")
        else:
            row += 2 * part(token.rstrip("?"))
        rows.append(row)
    params = init_params(CONFIG, seed)
    # One query of each group starts as its key does, but for the mark of a question, which it
    # turns around: attention begins as a search for the alike elsewhere.
    mark = part("?") / np.linalg.norm(part("?"))
    turn = np.eye(len(mark), dtype=np.float32) - 2 * np.outer(mark, mark)
    for layer in params["layers"][1:]:
        alike = jnp.einsum("EF,FND->END", turn, layer["wk"])
        layer["wq"] = layer["wq"].at[:, :: CONFIG.heads_per_kv_head].set(alike)
    embed = np.stack(rows)
    return params | {"embed": jnp.asarray(embed / np.std(embed))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Contexts and the questions asked about their prefixes.

    Attributes:
      context_ids: [batch, context_len] int32.
      tail_ids: [batch, tails, tail_len] int32, questions and all but the last token of answers.
      seen: [batch, tails] int32, tokens of the context that a tail sees.
      targets: [batch, tails, tail_len] int32, the next token where it belongs to an answer.
      weights: [batch, tails, tail_len] f32, of each target; 0 = none.
    """

    context_ids: np.ndarray
    tail_ids: np.ndarray
    seen: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


jax.tree_util.register_dataclass(
    Batch, ["context_ids", "tail_ids", "seen", "targets", "weights"], []
)


class TaskModel(nnx.Module):
    """The parameters of the package's own decoder, held so that nnx and optax can change them."""

    def __init__(self, params: Params):
        """Hold a tree of `param_specs(CONFIG)`."""
        self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def tree(self) -> Params:
        """Return the plain tree of arrays, which every engine of the package takes."""
        return jax.tree.map(
            lambda leaf: leaf[...], self.params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
        )

    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return logits after every token; see all_logits."""
        return all_logits(self.tree(), CONFIG, batch)


def all_logits(params: Params, config: ModelConfig, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Run the package's decoder over contexts and tails at once.

    A tail sees the first `seen` tokens of its context and itself, as a query of an engine does:
    one context serves many questions, at every length.

    Returns:
      logits after the contexts' tokens, [batch, context_len, vocab_size] f32, and after the
      tails', [batch, tails, tail_len, vocab_size] f32.
    """
    batch_size, context_len = batch.context_ids.shape
    _, tails, tail_len = batch.tail_ids.shape
    split = batch_size * context_len
    context_at = jnp.broadcast_to(jnp.arange(context_len), (batch_size, context_len))
    tail_at = batch.seen[:, :, None] + jnp.arange(tail_len)
    positions = jnp.concatenate([context_at.ravel(), tail_at.ravel()]).astype(jnp.int32)
    context_apart = jnp.arange(context_len)[:, None] - jnp.arange(context_len)
    tail_apart = jnp.arange(tail_len)[:, None] - jnp.arange(tail_len)
    tail_at = tail_at.reshape(batch_size, tails * tail_len, 1)
    far_apart = tail_at - jnp.arange(context_len)
    in_prefix = jnp.arange(context_len) < jnp.repeat(batch.seen, tail_len, axis=1)[:, :, None]

    def attend(layer_idx, q, k, v, state):
        layer = config.layers[layer_idx]
        window = layer.window or config.max_positions
        causal = (context_apart >= 0) & (context_apart < window)
        own = ((tail_apart >= 0) & (tail_apart < window))[:, None, None]  # beside [.., Q, G, H, K]
        before = (in_prefix & (far_apart < window))[:, None, None]  # beside [B, G, H, Q, K]
        frequencies = jnp.asarray(layer.rope.inverse_frequencies(config.head_dim))
        q = layers.rotate(q * config.head_dim**-0.5, positions, frequencies)
        k = layers.rotate(k, positions, frequencies)
        q = q.reshape(-1, config.num_kv_heads, config.heads_per_kv_head, config.head_dim)
        context_q, context_k, context_v = (
            x[:split].reshape(batch_size, context_len, *x.shape[1:]) for x in (q, k, v)
        )
        tail_q, tail_k, tail_v = (
            x[split:].reshape(batch_size, tails, tail_len, *x.shape[1:]) for x in (q, k, v)
        )
        scores = jnp.einsum("BQGHD,BKGD->BGHQK", context_q, context_k)
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e30))
        context_out = jnp.einsum("BGHQK,BKGD->BQGHD", shares, context_v)

        flat_q = tail_q.reshape(batch_size, tails * tail_len, *tail_q.shape[3:])
        far = jnp.einsum("BQGHD,BKGD->BGHQK", flat_q, context_k)
        far = jnp.where(before, far, -1e30)
        near = jnp.einsum("BTQGHD,BTKGD->BTQGHK", tail_q, tail_k)
        near = jnp.where(own, near, -1e30)
        near = near.reshape(batch_size, tails * tail_len, *near.shape[3:])
        near = jnp.einsum("BQGHK->BGHQK", near)
        shares = jax.nn.softmax(jnp.concatenate([far, near], axis=-1))
        far, near = shares[..., :context_len], shares[..., context_len:]
        out = jnp.einsum("BGHQK,BKGD->BQGHD", far, context_v)
        near = near.reshape(*near.shape[:3], tails, tail_len, tail_len)
        near_out = jnp.einsum("BGHTQK,BTKGD->BTQGHD", near, tail_v)
        out = out.reshape(near_out.shape) + near_out
        width = (config.num_heads, config.head_dim)
        mixed = [context_out.reshape(-1, *width), out.reshape(-1, *width)]
        return jnp.concatenate(mixed), state

    ids = jnp.concatenate([batch.context_ids.ravel(), batch.tail_ids.ravel()])
    states = (None,) * config.num_layers
    hidden, _ = decoder.forward(params, config, ids, attend, states)
    logits = decoder.logits(params, config, hidden)
    return (
        logits[:split].reshape(batch_size, context_len, config.vocab_size),
        logits[split:].reshape(batch_size, tails, tail_len, config.vocab_size),
    )


def loss(model: TaskModel, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the mean negative log-likelihood of answers, and whether each target is likeliest.

    Returns:
      loss: scalar f32, nats.  right: [batch, tails, tail_len] bool.
    """
    rows, logits = model(batch)
    chosen = _chosen(logits, batch.targets)
    mean = -(chosen * batch.weights).sum() / batch.weights.sum()
    mean_row = -_chosen(rows[:, :-1], batch.context_ids[:, 1:]).mean()
    return mean + ROW_WEIGHT * mean_row, logits.argmax(axis=-1) == batch.targets


def _chosen(logits, targets):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
