"""Comparing what the engine's verbs answer with the history-true reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxstate.answer import Answer, FinishReason, Source
from jaxstate.flash import Question
from jaxstate.session import PaidTail
from oracle.equality import Rule, log_softmax, require, top_gap
from oracle.history import Context, History
from oracle.mirror import Mirror


class Answers:
    """Compares answers, choices and paid tails."""

    def __init__(self, history: History, rule: Rule):
        """Compare with what `history` computes, by `rule`."""
        self._history = history
        self._rule = rule

    def check_greedy(
        self,
        answer: Answer,
        mirror: Mirror,
        question: Sequence[int],
        *,
        skip: int,
        ahead: int = 0,
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
        top_logprobs: int | None = None,
        committed: bool = False,
    ) -> Context:
        """Compare a greedy answer token by token; returns the records of question and answer.

        Args:
          mirror: the session as it was when it was asked.
          skip: tokens of the question that were paid for.
          ahead: tokens of the answer that were.
        """
        token_ids = list(answer.token_ids)
        ended = bool(token_ids) and token_ids[-1] in eos_ids
        require(
            not set(token_ids[:-1]) & set(eos_ids)
            and (ended and len(token_ids) <= max_new_tokens or len(token_ids) == max_new_tokens),
            f"query: expected {max_new_tokens} tokens or an end at one of {list(eos_ids)}, "
            f"got {token_ids}",
        )
        reason = FinishReason.EOS if ended else FinishReason.LENGTH
        require(
            answer.finish_reason is reason,
            f"query: expected {reason}, got {answer.finish_reason}",
        )
        records = self._history.extend(mirror.context, [*question, *token_ids])
        wants = [self._history.logits(record) for record in records[len(question) - 1 : -1]]
        self._rule.greedy(token_ids, wants, "query")
        require(
            [token.token_id for token in answer.tokens] == token_ids,
            "query: streamed tokens are not those of the answer",
        )
        for index, (token, want) in enumerate(zip(answer.tokens, wants, strict=True)):
            if top_logprobs is None:
                require(
                    token.logprob is None and token.top_logprobs is None,
                    "query: logprobs that were not asked for",
                )
                continue
            what = f"query: token {index}"
            self._rule.logprobs({token.token_id: token.logprob}, want, what)
            self._rule.top_logprobs(dict(token.top_logprobs), want, top_logprobs, what)
        self._check_gap(answer.gap, wants[0], "query")
        self._check_origin(answer, mirror, skip, "query")
        forwarded = len(question) - skip + max(len(token_ids) - 1 - ahead, 0) + committed
        require(
            answer.tokens_forwarded == forwarded,
            f"query: expected {forwarded} tokens forwarded, got {answer.tokens_forwarded}",
        )
        return records

    def check_choice(
        self,
        answer: Answer,
        mirror: Mirror,
        question: Sequence[int],
        choices: Sequence[Sequence[int]],
        *,
        skip: int,
        num_rows: int,
    ) -> None:
        """Compare every choice's probability.

        Args:
          num_rows: outputs of the longest step; with fewer branches all is one step.
        """
        root = self._history.extend(mirror.context, question)
        self._check_scores(answer, mirror.context + root, choices)
        self._check_gap(answer.gap, self._history.logits(root[-1]), "choose")
        self._check_origin(answer, mirror, skip, "choose")
        require(
            answer.token_ids == tuple(choices[answer.choice])
            and answer.finish_reason is FinishReason.CHOICE,
            f"choose: expected the ids of choice {answer.choice}, got {answer.token_ids}",
        )
        branches = {tuple(choice[:n]) for choice in choices for n in range(1, len(choice))}
        least = len(question) - skip + len(branches)
        got = answer.tokens_forwarded
        require(
            got == least or (got > least and len(branches) >= num_rows),
            f"choose: expected {least} tokens forwarded, got {got}",
        )

    def check_content(self, answer: Answer, mirror: Mirror, question: Question) -> None:
        """Compare what an answer says with the reference, wherever it came from."""
        root = self._history.extend(mirror.context, question.token_ids)
        if question.choices:
            self._check_scores(answer, mirror.context + root, question.choices)
            return
        records = self._history.extend(mirror.context + root, answer.token_ids)
        wants = [self._history.logits(record) for record in (root[-1], *records[:-1])]
        self._rule.greedy(list(answer.token_ids), wants, "stored answer")
        self._check_gap(answer.gap, wants[0], "stored answer")

    def check_paid(
        self,
        paid: PaidTail,
        mirror: Mirror,
        entry: Sequence[int],
        *,
        max_new_tokens: int,
        min_gap: float,
        eos_ids: Sequence[int],
    ) -> None:
        """Compare a paid tail: the entry, what was decoded behind it, and why it ends there."""
        token_ids = list(paid.token_ids)
        count = len(token_ids) - len(entry)
        require(
            token_ids[: len(entry)] == list(entry) and count <= max_new_tokens,
            f"advance: expected {list(entry)} and at most {max_new_tokens} more, got {token_ids}",
        )
        records = self._history.extend(mirror.context, token_ids)
        wants = [self._history.logits(record) for record in records[len(entry) - 1 :]]
        self._rule.greedy(token_ids[len(entry) :], wants[:-1], "advance")
        for want in wants[:-1]:
            require(
                self._may_go_on(want, min_gap, eos_ids),
                f"advance: went on past a gap of {top_gap(want):.4g} or an end token",
            )
        require(
            count == max_new_tokens or self._may_stop(wants[-1], min_gap, eos_ids),
            f"advance: stopped at a gap of {top_gap(wants[-1]):.4g} without an end token",
        )
        require(len(paid.along) == len(wants), f"advance: {len(paid.along)} distributions kept")
        for kept, want in zip(paid.along, wants, strict=True):
            self._rule.logits(np.asarray(kept.row_logits()), want, "advance")
            self._rule.greedy_token(kept.top_id, want, "advance: next token")
            self._check_gap(kept.gap, want, "advance")

    def _may_go_on(self, want: np.ndarray, min_gap: float, eos_ids: Sequence[int]) -> bool:
        """Tell whether decoding ahead may pass this distribution, given both errors and ties."""
        slack = 2 * self._rule.tolerance(want)
        return top_gap(want) >= min_gap - slack and not self._tops(want) <= set(eos_ids)

    def _may_stop(self, want: np.ndarray, min_gap: float, eos_ids: Sequence[int]) -> bool:
        slack = 2 * self._rule.tolerance(want)
        return top_gap(want) < min_gap + slack or bool(self._tops(want) & set(eos_ids))

    def _tops(self, want: np.ndarray) -> set[int]:
        """Return the most likely token, in a near-tie the second one too."""
        count = 2 if top_gap(want) < self._rule.near_tie(want) else 1
        return set(np.argsort(want)[::-1][:count].tolist())

    def _check_scores(
        self, answer: Answer, context: Context, choices: Sequence[Sequence[int]]
    ) -> None:
        """Compare choices with scores computed one by one.

        A choice that others continue has what its next tokens leave over of its probability; the
        little that may be left is the less certain.
        """
        scores, reaches, errors = [], [], []
        for choice in choices:
            records = self._history.extend(context, choice)
            wants = [self._history.logits(record) for record in (context[-1], *records)]
            reach = math.fsum(
                log_softmax(want)[token] for want, token in zip(wants[:-1], choice, strict=True)
            )
            following = {
                other[len(choice)]
                for other in choices
                if len(other) > len(choice) and tuple(other[: len(choice)]) == tuple(choice)
            }
            taken = math.fsum(np.exp(log_softmax(wants[-1])[list(following)]))
            scores.append(reach + math.log(max(1 - taken, 1e-9)))
            reaches.append(reach)
            errors.append(sum(2 * self._rule.tolerance(want) for want in wants))
        peak = max(scores)
        total = peak + math.log(math.fsum(math.exp(score - peak) for score in scores))
        shared = math.fsum(
            error * math.exp(reach - total) for error, reach in zip(errors, reaches, strict=True)
        )
        allowed = [
            shared + error * math.exp(reach - score)
            for error, reach, score in zip(errors, reaches, scores, strict=True)
        ]
        require(
            len(answer.choice_logprobs) == len(choices),
            f"choose: expected {len(choices)} logprobs, got {len(answer.choice_logprobs)}",
        )
        for index, got in enumerate(answer.choice_logprobs):
            want, what = scores[index] - total, f"choose: choice {index}"
            if allowed[index] < 0.5:
                self._rule.close(got, want, allowed[index], what)
            else:
                self._rule.close(math.exp(got), math.exp(want), 2 * shared, f"{what}: probability")
        behind = peak - scores[answer.choice]
        slack = allowed[answer.choice] + allowed[scores.index(peak)]
        require(
            behind <= slack,
            f"choose: choice {answer.choice} is {behind:.3g} behind choice {scores.index(peak)}",
        )

    def _check_origin(self, answer: Answer, mirror: Mirror, skip: int, what: str) -> None:
        source = Source.RESUMED if skip else Source.COMPUTED
        self._rule.tally.events[source.value] += 1
        got = (answer.source, answer.version, answer.context_len)
        want = (source, mirror.version, len(mirror.context))
        require(got == want, f"{what}: expected source, version, context {want}, got {got}")

    def _check_gap(self, got: float, want: np.ndarray, what: str) -> None:
        self._rule.close(got, top_gap(want), 2 * self._rule.tolerance(want), f"{what}: gap")
