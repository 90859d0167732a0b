"""Fixed choices: scores against walking every continuation, and parts that fit a step."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxstate.choices import ChoiceTree, tree_parts
from jaxstate.errors import InputError

SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
VOCAB = 5
CHOICES = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple),
    min_size=1,
    max_size=7,
    unique=True,
)


def _next_probs(prefix):
    """A language: some distribution after every prefix."""
    seed = int("".join(str(token + 1) for token in (0, *prefix)))
    return np.random.default_rng(seed).dirichlet(np.ones(VOCAB))


def _edge_logprobs(tree):
    paths = [()]
    for node in tree.nodes[1:]:
        paths.append((*paths[node.parent], node.token_id))
    return [float(np.log(_next_probs(paths[node])[token])) for node, token in tree.edges()]


def _probability(choice, choices):
    """Chance that text sampled from the language is this choice and no longer one."""
    chance = 1.0
    for index, token in enumerate(choice):
        chance *= _next_probs(choice[:index])[token]
    longer = {
        other[len(choice)]
        for other in choices
        if len(other) > len(choice) and other[: len(choice)] == choice
    }
    return chance * (1 - sum(_next_probs(choice)[token] for token in longer))


@SETTINGS
@hypothesis.given(CHOICES)
def test_scores_equal_brute_force(choices):
    tree = ChoiceTree(choices)
    found = tree.scores(_edge_logprobs(tree))
    wanted = np.asarray([_probability(choice, choices) for choice in choices])
    np.testing.assert_allclose(np.exp(found), wanted / wanted.sum(), rtol=1e-9, atol=1e-12)


@SETTINGS
@hypothesis.given(CHOICES, st.randoms(use_true_random=False))
def test_order_of_the_choices_does_not_matter(choices, random):
    shuffled = list(choices)
    random.shuffle(shuffled)
    scores = {}
    for some in (choices, shuffled):
        tree = ChoiceTree(some)
        for choice, score in zip(some, tree.scores(_edge_logprobs(tree)), strict=True):
            scores.setdefault(choice, []).append(score)
    for first, second in scores.values():
        assert first == pytest.approx(second, rel=1e-9)


def test_all_choices_of_one_length_share_the_whole_probability():
    choices = [(first, second) for first in range(VOCAB) for second in range(VOCAB)]
    tree = ChoiceTree(choices)
    found = np.exp(tree.scores(_edge_logprobs(tree)))
    wanted = [_next_probs(())[a] * _next_probs((a,))[b] for a, b in choices]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_single_choice_is_certain():
    tree = ChoiceTree([(3, 1)])
    assert tree.scores(_edge_logprobs(tree)) == [0.0]


def test_prefix_whose_children_take_everything_has_nothing_left():
    tree = ChoiceTree([(1,), (1, 2)])
    scores = tree.scores([float(np.log(0.5)), 0.0])
    assert scores == [-np.inf, 0.0]


def test_very_unlikely_choices_are_still_told_apart():
    tree = ChoiceTree([(0,), (1,)])
    found = tree.scores([-2000.0, -2001.0])
    assert found[0] - found[1] == pytest.approx(1.0)
    assert np.exp(found).sum() == pytest.approx(1.0)


def test_distributions_are_needed_only_where_choices_go_on():
    tree = ChoiceTree([(1, 2), (1, 3, 4), (1,)])
    paths = {0: (), 1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 3, 4)}
    assert [paths[node] for node in tree.branching] == [(), (1,), (1, 3)]
    assert [(paths[node], token) for node, token in tree.edges()] == [
        ((), 1),
        ((1,), 2),
        ((1,), 3),
        ((1, 3), 4),
    ]


@pytest.mark.parametrize(
    "choices, message",
    [
        ([], "choices: expected at least one, got none"),
        ([(1,), ()], r"choices\[1\]: expected at least one token"),
        ([(1, 2), (3,), (1, 2)], r"choices\[2\]: .* same token ids as choices\[0\]"),
    ],
)
def test_useless_choices_are_refused(choices, message):
    with pytest.raises(InputError, match=message):
        ChoiceTree(choices)


@SETTINGS
@hypothesis.given(CHOICES, st.integers(1, 4), st.integers(3, 8))
def test_parts_cover_every_inner_branching_node_with_its_ancestors(choices, wanted, tokens):
    tree = ChoiceTree(choices)
    parts = tree_parts(tree, wanted, tokens)
    asked = [part.nodes[index] for part in parts for index in part.wanted]
    assert sorted(asked) == [node for node in tree.branching if node]
    for part in parts:
        assert 1 <= len(part.wanted) <= wanted
        assert len(part.nodes) <= tokens
        for index, node in enumerate(part.nodes):
            assert part.token_ids[index] == tree.nodes[node].token_id
            assert part.depths[index] == tree.nodes[node].depth
            parent = tree.nodes[node].parent
            assert part.parents[index] < index
            assert (part.nodes[part.parents[index]] if parent else -1) == (parent or -1)
            assert parent or part.parents[index] == -1


def test_choice_longer_than_a_step_is_refused():
    tree = ChoiceTree([(1, 2, 3, 4, 1)])
    assert tree_parts(tree, 1, 4)
    with pytest.raises(InputError, match="choices: expected at most 3 tokens each, got 5"):
        tree_parts(tree, 1, 3)
