"""Train the task's model: short contexts first, longer ones later, a checkpoint at the end.

    cd bench && python -m task.train_task --out DIR --state DIR

About 22 processor minutes (process_cpu_s in the log, one thread). After every stage its state is
kept in --state, from where the next call goes on; a log of loss and accuracy, by kind of question
and of the digits of the price that it hangs on, is written there as JSON lines.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from task import batches, questions, task_model, tokenizer
from task.batches import Mix
from task.task_model import Batch, TaskModel

from jaxstate.models import checkpoint
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.models.params import Params

SEED = 0
_LOG_EVERY = 50
_ADAM_SHARE = 0.6  # of Muon's learning rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training.

    Attributes:
      mix: what its batches look like.
      steps: how many of them.
      peak, end: learning rate at the begin and at the end, linear between.
    """

    mix: Mix
    steps: int
    peak: float
    end: float


STAGES = (
    Stage(
        mix=Mix(rows=10, contexts=6, questions=48, moves=(10.0, 60.0), real_share=0.0),
        steps=250, peak=0.005, end=0.005,
    ),
    Stage(
        mix=Mix(rows=16, contexts=4, questions=64, moves=(2.0, 40.0), real_share=0.2),
        steps=450, peak=0.005, end=0.003,
    ),
    Stage(
        mix=Mix(rows=36, contexts=3, questions=96, moves=(1.5, 20.0)),
        steps=400, peak=0.003, end=0.0015,
    ),
    Stage(mix=Mix(rows=56, contexts=2, questions=160), steps=250, peak=0.0015, end=0.0005),
    Stage(mix=Mix(rows=200, contexts=1, questions=240), steps=70, peak=0.0005, end=0.0001),
)  # fmt: skip


def main() -> None:
    """Parse arguments and run what is left to do."""
    parser = argparse.ArgumentParser(description="Train the task's model.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="new checkpoint directory")
    parser.add_argument("--state", type=pathlib.Path, required=True, help="directory to resume in")
    args = parser.parse_args()
    args.state.mkdir(parents=True, exist_ok=True)
    model = TaskModel(task_model.first_params(SEED))
    optimizer = nnx.Optimizer(model, _transformation(), wrt=nnx.Param)
    done = [index for index in range(len(STAGES)) if _kept(args.state, index).is_file()]
    first = max(done) + 1 if done else 0
    if first:
        _restore((model, optimizer), _kept(args.state, first - 1))
    for index in range(first, len(STAGES)):
        _run(index, model, optimizer, args.state / "log.jsonl")
        leaves = jax.tree.leaves(nnx.state((model, optimizer)))
        np.savez(_kept(args.state, index), *[np.asarray(leaf) for leaf in leaves])
    save(args.out, model.tree())


def save(path: pathlib.Path, params: Params) -> None:
    """Write the checkpoint that `jaxstate.models.load` reads."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    checkpoint.save_checkpoint(
        path,
        LoadedModel(
            config=task_model.CONFIG, params=params, tokenizer=tokenizer.build(), name=path.name,
            fingerprint=digest.hexdigest(),
        ),
    )  # fmt: skip


def _transformation() -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, Adam for embeddings and norms.

    Source: Muon (https://kellerjordan.github.io/posts/muon), AdamW (arXiv:1711.05101).
    """
    ends = np.cumsum([stage.steps for stage in STAGES])
    rates = [optax.linear_schedule(stage.peak, stage.end, stage.steps) for stage in STAGES]
    rate = optax.join_schedules(rates, ends[:-1].tolist())
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            rate, adam_b2=0.98, adam_learning_rate=lambda count: _ADAM_SHARE * rate(count),
            muon_weight_dimension_numbers=_dimensions, consistent_rms=0.2,
        ),
    )  # fmt: skip


def _dimensions(params: Any) -> Any:
    """Say which axes of a matrix are its inputs and its outputs; None = Adam's."""

    def of(path, leaf):
        name = jax.tree_util.keystr(path)
        if "layers" not in name or leaf.ndim < 2:
            return None
        inputs = leaf.ndim - 1 if "wo" in name else 1
        axes = tuple(range(leaf.ndim))
        return optax.contrib.MuonDimensionNumbers(axes[:inputs], axes[inputs:])

    return jax.tree_util.tree_map_with_path(of, params)


@nnx.jit
def _step(model: TaskModel, optimizer: nnx.Optimizer, batch: Batch):
    (loss, right), gradients = nnx.value_and_grad(task_model.loss, has_aux=True)(model, batch)
    optimizer.update(model, gradients)
    return loss, right


def _run(index: int, model: TaskModel, optimizer: nnx.Optimizer, log: pathlib.Path) -> None:
    """Train for one stage; accuracies are those of batches that were never seen before."""
    stage = STAGES[index]
    rng = np.random.default_rng([SEED, index])
    began, began_cpu = time.perf_counter(), time.process_time()
    seen: dict[str, list[float]] = collections.defaultdict(list)
    for step in range(1, stage.steps + 1):
        batch, kinds = batches.draw(rng, stage.mix)
        loss, right = _step(model, optimizer, batch)
        seen["loss"].append(float(loss))
        for index_of_kind, kind in enumerate(questions.KINDS):
            for name, found in zip(("", " tens", " units"), np.asarray(right), strict=True):
                seen[kind + name].append(float(found[kinds == index_of_kind].mean()))
        if step % _LOG_EVERY == 0 or step == stage.steps:
            line = {
                "stage": index, "step": step, "rows": stage.mix.rows,
                "wall_s": round(time.perf_counter() - began, 1),
                "cpu_s": round(time.process_time() - began_cpu, 1),
                "process_cpu_s": round(time.process_time(), 1),
                **{name: round(float(np.mean(values)), 4) for name, values in seen.items()},
            }  # fmt: skip
            seen.clear()
            print(json.dumps(line), flush=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _kept(directory: pathlib.Path, index: int) -> pathlib.Path:
    return directory / f"stage{index}.npz"


def _restore(target: Any, path: pathlib.Path) -> None:
    """Put the kept state of model and optimizer in place."""
    state = nnx.state(target)
    with np.load(path) as file:
        leaves = [file[name] for name in file.files]
    nnx.update(target, jax.tree.unflatten(jax.tree.structure(state), leaves))


if __name__ == "__main__":
    main()
