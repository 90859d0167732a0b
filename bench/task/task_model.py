"""The task's model as an nnx.Module, and its loss over contexts with many questions each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from task import candles, questions, tokenizer

from jaxstate.models import decoder, layers
from jaxstate.models.config import LayerConfig, ModelConfig
from jaxstate.models.params import Params, init_params
from jaxstate.models.rope import RopeConfig

PRICE_WEIGHT = 0.3
# The first layer sees five tokens: a question, or a name and the close behind it. Two see the last
# eight and the last four rows from a question's end, the others everything. A quarter of each head
# turns with positions, the rest matches what is named, wherever it stands.
_ROPE = RopeConfig(theta=1e3, rotary_dim=16)
_WINDOWS = (
    questions.NUM_TOKENS,
    *(candles.ROW_TOKENS * rows + questions.NUM_TOKENS for rows in (8, 4)),
    None,
    None,
)
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
    layers=tuple(LayerConfig(rope=_ROPE, window=window) for window in _WINDOWS),
    tied_embeddings=False,
)
_NAME_DIMS = 48  # of hidden_size: as many as a head has dimensions that do not turn


def first_params(seed: int) -> Params:
    """Draw the weights that training starts from; only what they say of names is not random.

    A digit's embedding is the sum of its parts': its place, which digit it is, how large. So it is
    a number from the start. A name has dimensions of its own, which the first layer hands to the
    tokens behind it; in the layers that see everything one head searches for the same name.
    """
    rng = np.random.default_rng(seed)
    parts: dict[str, np.ndarray] = {}

    def part(name: str) -> np.ndarray:
        if name not in parts:
            parts[name] = rng.standard_normal(CONFIG.hidden_size).astype(np.float32)
            parts[name][:_NAME_DIMS] = 0.0
        return parts[name]

    # The last of a name's dimensions marks questions, which are not what is searched for.
    asked = {"close", "high", "low", *questions.WORDINGS}
    asked |= {text.format(digit) for text in (" {}", "{}?") for digit in range(10)}
    embed = np.zeros((CONFIG.vocab_size, CONFIG.hidden_size), np.float32)
    for token, index in tokenizer.tokens().items():
        digit = next((int(each) for each in token if each.isdigit()), 0)
        size = np.float32(digit - 4.5) / 2
        if token in candles.NAMES or token == " first":
            embed[index, : _NAME_DIMS - 1] = rng.choice((-1.5, 1.5), _NAME_DIMS - 1)
            embed[index] += part("name")
        elif token[:-1] in tokenizer.TENS:
            place = token[:-1]
            embed[index] = part(place) + part(token) + size * part(f"size {place}")
        elif token[0].isdigit():
            place = f"units{token[1:]}"
            embed[index] = part(place) + part(token) + size * part(f"size {place}")
        else:
            embed[index] = 2 * part(token)
        if token in asked:
            embed[index, _NAME_DIMS - 1] = 1.5
    start, first = (tokenizer.tokens()[token] for token in (candles.START, " first"))
    embed[start, :_NAME_DIMS] = embed[first, :_NAME_DIMS]  # what the first row has before it
    params = init_params(CONFIG, seed)
    turning = np.flatnonzero(_ROPE.inverse_frequencies(CONFIG.head_dim))
    turning = np.concatenate([turning, turning + CONFIG.head_dim // 2])
    still = np.setdiff1d(np.arange(CONFIG.head_dim), turning)[:_NAME_DIMS]
    names = np.arange(_NAME_DIMS)
    for layer, window in zip(params["layers"], _WINDOWS, strict=True):
        layer["wo"] = layer["wo"].at[..., names].set(0.0)
        layer["w_down"] = layer["w_down"].at[..., names].set(0.0)
        if window == questions.NUM_TOKENS:
            layer["wq"] *= 0.1  # an even mean over the window
            layer["wv"] = layer["wv"].at[:, 0, still].set(0.0).at[names, 0, still].set(2.5)
            layer["wo"] = (4 * layer["wo"]).at[0, still].set(0.0).at[0, still, names].set(2.5)
        elif window is None:
            for weight in ("wq", "wk"):
                matrix = layer[weight].at[:, 0].set(0.0)
                layer[weight] = matrix.at[names, 0, still].set(2.0)
            layer["wk"] = layer["wk"].at[names[-1], 0, still[-1]].set(-16.0)
    return params | {"embed": jnp.asarray(embed / np.std(embed))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Contexts and the questions asked about their prefixes.

    Attributes:
      context_ids: [batch, context_len] int32.
      tail_ids: [batch, tails, tail_len] int32, questions.
      seen: [batch, tails] int32, tokens of the context that a tail sees.
      answers: [batch, tails] int32, token ids.
      prices: [batch, tails] int32, ticks, what the answers hang on.
    """

    context_ids: np.ndarray
    tail_ids: np.ndarray
    seen: np.ndarray
    answers: np.ndarray
    prices: np.ndarray


jax.tree_util.register_dataclass(
    Batch, ["context_ids", "tail_ids", "seen", "answers", "prices"], []
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

    def __call__(self, batch: Batch) -> jax.Array:
        """Return logits behind every question; see answer_logits."""
        return answer_logits(self.tree(), CONFIG, batch)


def answer_logits(params: Params, config: ModelConfig, batch: Batch) -> jax.Array:
    """Run the package's decoder over contexts and tails at once.

    A tail sees the first `seen` tokens of its context and itself, as a query of an engine does:
    one context serves many questions, at every length.

    Returns:
      logits after each tail's last token, [batch, tails, vocab_size] f32.
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
    tail_ends = hidden[split:].reshape(batch_size * tails, tail_len, -1)[:, -1]
    logits = decoder.logits(params, config, tail_ends)
    return logits.reshape(batch_size, tails, config.vocab_size)


def loss(model: TaskModel, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the mean negative log-likelihood, and the largest logit among answers and digits.

    Where an answer belongs, the logits of digits have to tell the price that it hangs on: two
    digits where yes or no is one bit, so that finding the price is learnt first.

    Returns:
      loss: scalar f32, nats.  right: [3, batch, tails] bool, of answer, first and second digit.
    """
    ids = tokenizer.tokens()
    answers = np.array([ids[questions.NO], ids[questions.YES]])
    tens, units = (
        np.array([ids[text.format(digit)] for digit in range(10)]) for text in (" {}", "{}")
    )
    logits = model(batch)
    total, right = jnp.float32(0.0), []
    for group, target, weight in (
        (answers, (batch.answers == answers[1]).astype(jnp.int32), 1.0),
        (tens, batch.prices // 10, PRICE_WEIGHT),
        (units, batch.prices % 10, PRICE_WEIGHT),
    ):
        among = logits[..., group]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(among), target[..., None], axis=-1)
        total -= weight * chosen.mean()
        right.append(among.argmax(axis=-1) == target)
    return total, jnp.stack(right)
