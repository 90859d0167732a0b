"""The soak: tenants at a given load, their answers computed again, nothing left at the end."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import common
import numpy as np
from tenants_traffic import ANSWER_TOKENS, QUESTION_TOKENS, Sent, Tenant, Traffic

from jaxstate.answer import Answer, Source
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.plan import JobClass
from jaxstate.serving.local_service import LocalService

PAGE = 64
TRIALS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much of everything.

    Attributes:
      host_share: of what the pool has no room for, that waits in host memory; the rest on disk.
      busy: share of the time in which steps run.
      trial_s, seconds: of traffic, to set the rate (several times) and to count.
      samples: answers that are computed again.
    """

    sessions: int
    tokens: int
    context_len: int
    host_share: float
    busy: float = 0.8
    trial_s: float
    seconds: float
    samples: int
    preposition: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Of one class, seconds: from arrival to the end, and to the beginning."""

    sojourn_s: Sequence[float]
    wait_s: Sequence[float]


@dataclasses.dataclass(kw_only=True)
class Found:
    """What came of it.

    Attributes:
      rate: arrivals a second.
      busy: share of the time in which steps ran.
      done: verbs, answers that were looked up included.
      moved_out, brought_back: sessions.
      times: by class.
      checked, different, near_ties: answers that were computed again, those that differ before a
        near-tie, those with a near-tie.
      sources: of the checked answers.
      left: what was not given back, by name; empty if nothing.
    """

    rate: float
    busy: float
    done: int
    moved_out: int
    brought_back: int
    times: dict[JobClass, Times]
    checked: int
    different: int
    near_ties: int
    sources: dict[str, int]
    left: dict[str, int]


def soak(model: LoadedModel, size: Size, swap_dir: pathlib.Path, seed: int) -> Found:
    """Open sessions, let them act, compute answers again, close all; raises what a verb raised."""
    own = size.sessions * size.context_len * model.config.bytes_per_cell
    config = EngineConfig(
        num_pages=size.sessions * size.tokens // 2 // PAGE, page_size=PAGE,
        context_len=size.context_len, evict_quantum=512, host_bytes=int(own * size.host_share),
        swap_dir=str(swap_dir),
    )  # fmt: skip
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(engine, preposition=size.preposition, clock=time.perf_counter)
    tenants: list[Tenant] = []
    traffic = Traffic(
        service, tenants, vocab_size=model.config.vocab_size, context_len=size.context_len
    )
    rng = np.random.default_rng(seed)
    for _ in range(size.sessions):
        ids = traffic.draw(rng, size.tokens)
        session = service.create(ids)
        version = engine.session(session).version
        tenants.append(
            Tenant(session=session, token_ids=ids, first_version=version, first_len=len(ids))
        )
    traffic.one_by_one(10, seed)  # warms up
    rate = size.busy / traffic.one_by_one(40, seed + 1)
    for trial in range(TRIALS):
        # What comes together shares steps, which one after the other does not.
        rate *= size.busy / traffic.play(rate, size.trial_s, seed + 2 + trial)
    traffic.sent.clear()
    for figures in service.metrics.by_class.values():
        figures.sojourn_s.clear()
        figures.wait_s.clear()
    busy = traffic.play(rate, size.seconds, seed + 2 + TRIALS, keep_busy=size.busy)
    flash = service.metrics.by_class[JobClass.FLASH]
    times = {
        job_class: Times(
            sojourn_s=[one.sojourn_s for one in traffic.sent if _counts(one, job_class)],
            wait_s=[one.wait_s for one in traffic.sent if _counts(one, job_class)],
        )
        for job_class in (JobClass.QUERY, JobClass.APPEND)
    }
    times[JobClass.FLASH] = Times(sojourn_s=list(flash.sojourn_s), wait_s=list(flash.wait_s))
    asked = [one for one in traffic.sent if one.question]
    chosen = [asked[i] for i in rng.permutation(len(asked))[: size.samples]]
    for tenant in tenants:
        held = engine.session(tenant.session).token_ids
        assert list(held) == tenant.token_ids, tenant.session
        service.close_session(tenant.session)
    service.close()
    tiers = engine.verbs.tiers
    left = {
        "cells used": engine.cells_used, "cells held": engine.cells_held,
        "host bytes": tiers.bytes_held("host"), "disk bytes": tiers.bytes_held("disk"),
        "copied bytes": tiers.copied_bytes,
        "files": len(list(swap_dir.iterdir())),
    }  # fmt: skip
    checked = _compute_again(model, size, chosen)
    sources: defaultdict[str, int] = defaultdict(int)
    for one in chosen:
        sources[one.pending.result().source.value] += 1
    return Found(
        rate=rate, busy=busy, done=len(traffic.sent), moved_out=tiers.moved_out,
        brought_back=tiers.brought_back, times=times, checked=len(chosen), sources=dict(sources),
        left={name: count for name, count in left.items() if count}, **checked,
    )  # fmt: skip


def _counts(one: Sent, job_class: JobClass) -> bool:
    return one.job_class is job_class and not one.was_there


def _compute_again(model: LoadedModel, size: Size, chosen: Sequence[Sent]) -> dict[str, Any]:
    """Ask again behind the tokens that each version had, on another engine's sessions."""
    most = size.context_len + QUESTION_TOKENS + ANSWER_TOKENS
    config = EngineConfig(
        num_pages=most // PAGE + 4, page_size=PAGE, context_len=size.context_len, evict_quantum=512
    )
    engine = Engine(model.params, model.config, config)
    by_session: defaultdict[str, list[Sent]] = defaultdict(list)
    for one in chosen:
        by_session[one.tenant.session].append(one)
    different, near_ties = 0, 0
    for several in by_session.values():
        session, at = None, 0
        for one in sorted(several, key=lambda one: one.pending.result().context_len):
            answer: Answer = one.pending.result()
            end = one.tenant.len_at(answer.version)
            assert end == answer.context_len, (end, answer)
            ids = one.tenant.token_ids[at:end]
            if session is None:
                session = engine.create(ids)
            elif ids:
                engine.append(session, ids)
            at = end
            assert one.question is not None
            again = engine.query(
                session, one.question.token_ids, max_new_tokens=ANSWER_TOKENS, top_logprobs=2
            )
            assert again.source is Source.COMPUTED
            sure = common.sure_len(again)
            near_ties += sure < ANSWER_TOKENS
            different += answer.token_ids[:sure] != again.token_ids[:sure]
        assert session is not None
        engine.close(session)
    return {"different": different, "near_ties": near_ties}
