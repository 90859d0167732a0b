"""One conversation on an engine over 1, 2 and 8 simulated devices, run as a program of its own.

The number of devices is fixed when a process starts, so the test starts this file. It prints a
JSON line per engine: what was split, answers, log-probabilities, and where the pool lies.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from jaxstate import Engine, EngineConfig, models
from jaxstate.state import StepShape

SHAPES = (StepShape(num_tokens=16, block_tokens=16, num_rows=4),)
TINY = models.ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    mlp_width=48,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_positions=128,
    layers=(
        models.LayerConfig(rope=models.RopeConfig(theta=100.0)),
        models.LayerConfig(rope=models.RopeConfig(theta=50.0), window=9),
    ),
    tied_embeddings=False,
)
EXPERTS = models.ExpertConfig(count=4, per_token=2, width=16, normalize=True)
MODELS = {
    "kv heads split": TINY,
    "queries split": dataclasses.replace(TINY, num_kv_heads=2),
    "experts": dataclasses.replace(
        TINY,
        layers=tuple(dataclasses.replace(layer, routed=True) for layer in TINY.layers),
        experts=EXPERTS,
    ),
    "nothing split": dataclasses.replace(TINY, num_heads=3, num_kv_heads=3, mlp_width=45),
}


def converse(params, model, mesh: Mesh | None, implementation: str) -> dict:
    """Append, slide, ask, choose; return everything that was computed."""
    sharding = None if mesh is None else models.Sharding.of(model, mesh)
    config = EngineConfig(
        num_pages=24, page_size=8, context_len=64, evict_quantum=16, step_shapes=SHAPES,
        implementation=implementation,
    )  # fmt: skip
    engine = Engine(params, model, config, sharding=sharding)
    ids = np.random.default_rng(4).integers(0, model.vocab_size, 200).tolist()
    session = engine.create(ids[:5], when_full="slide")
    engine.append(session, ids[5:40])
    first = engine.query(session, ids[40:43], max_new_tokens=4, top_logprobs=5)
    engine.append(session, ids[43:90])
    second = engine.query(session, ids[110:117], max_new_tokens=4, top_logprobs=5)
    chosen = engine.choose(session, ids[120:123], [ids[130:132], ids[132:135]])
    answers = (first, second)
    page = engine.executor._pool[0].k_pages
    return {
        "split": sorted(sharding.split) if sharding else [],
        "ids": [answer.token_ids for answer in answers],
        "logprobs": [token.logprob for answer in answers for token in answer.tokens],
        "choices": chosen.choice_logprobs,
        "kv_heads_per_device": page.sharding.shard_shape(page.shape)[0],
        "devices": len(page.sharding.device_set),
    }


def main() -> None:
    """Print a line per model and number of devices; the first of each is without a mesh."""
    name, implementation = sys.argv[1:3]
    if name in MODELS:
        model = MODELS[name]
        params = models.init_params(model, seed=1)
    for count in (0, 1, 2, 8):
        mesh = Mesh(np.array(jax.devices()[:count]), ("model",)) if count else None
        if name not in MODELS:  # weights are spread as they are read
            loaded = models.load(name, mesh=mesh)
            model, params = loaded.config, loaded.params
        print(json.dumps(converse(params, model, mesh, implementation)), flush=True)


if __name__ == "__main__":
    main()
