"""The engine in bf16, where attention runs in plain XLA."""

from __future__ import annotations

import dataclasses

import numpy as np
import tiny_engine
from oracle import equality, history

from jaxstate import models
from jaxstate.engine import Engine


def test_logits_equal_the_reference_within_the_tolerance_of_bf16():
    model = dataclasses.replace(tiny_engine.MODEL, dtypes=models.DtypePolicy.named("bfloat16"))
    params = models.init_params(model, seed=0)
    engine = Engine(params, model, tiny_engine.engine_config(implementation="auto"))
    assert engine.executor.implementation == "xla"
    rng = np.random.default_rng(0)
    ids, question = (rng.integers(0, model.vocab_size, count).tolist() for count in (40, 5))
    session = engine.create(ids[:9])
    engine.append(session, ids[9:])
    log = history.History(params, model)
    context = log.extend((), ids)
    wanted = log.logits(log.extend(context, question)[-1])
    got = np.asarray(engine.advance(session, question).ready.row_logits())
    equality.Rule("bfloat16").logits(got, wanted, "after the question")
    assert engine.bytes_held == engine.cells_held * model.bytes_per_cell
