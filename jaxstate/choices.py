"""Choosing among fixed answers by the probability of their real continuation ids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxstate.errors import InputError


@dataclasses.dataclass(slots=True)
class Node:
    """A prefix shared by some choices.

    Attributes:
      parent: index of the node before it, -1 for the root.
      token_id: the token that leads here from the parent; -1 for the root.
      depth: tokens from the root.
      children: token id to node index.
      choice: index of the choice that ends here, None if none does.
    """

    parent: int
    token_id: int
    depth: int
    children: dict[int, int]
    choice: int | None


class ChoiceTree:
    """The choices' continuation ids as a tree; nodes in breadth-first order of insertion.

    A choice's probability is the product of its tokens' probabilities; where it is a prefix of
    others, stopping there has what its children leave over. Probabilities are of the model's own
    distribution over the whole vocabulary; `scores` also normalizes them over the choices.
    """

    def __init__(self, choices: Sequence[Sequence[int]]):
        """Build the tree.

        Raises:
          InputError: no choice, an empty one, or two alike.
        """
        if not choices:
            raise InputError("choices: expected at least one, got none")
        self.nodes = [Node(parent=-1, token_id=-1, depth=0, children={}, choice=None)]
        self.num_choices = len(choices)
        for index, token_ids in enumerate(choices):
            if not token_ids:
                raise InputError(f"choices[{index}]: expected at least one token, got none")
            at = 0
            for token_id in token_ids:
                if token_id not in self.nodes[at].children:
                    self.nodes[at].children[token_id] = len(self.nodes)
                    self.nodes.append(
                        Node(
                            parent=at,
                            token_id=token_id,
                            depth=self.nodes[at].depth + 1,
                            children={},
                            choice=None,
                        )
                    )
                at = self.nodes[at].children[token_id]
            if self.nodes[at].choice is not None:
                raise InputError(
                    f"choices[{index}]: expected different continuations, got the same token ids "
                    f"as choices[{self.nodes[at].choice}]"
                )
            self.nodes[at].choice = index

    @property
    def branching(self) -> list[int]:
        """Nodes whose next-token distribution is needed: those with children, root first."""
        return [index for index, node in enumerate(self.nodes) if node.children]

    def first_tokens(self) -> list[int] | None:
        """The first token of each choice, in order; None where two begin alike."""
        first = list(self.nodes[0].children)  # in the order of the choices
        return first if len(first) == self.num_choices else None

    def edges(self) -> list[tuple[int, int]]:
        """(node, token id) pairs whose logprobs are needed, in a fixed order."""
        return [(index, token) for index in self.branching for token in self.nodes[index].children]

    def scores(self, edge_logprobs: Sequence[float]) -> list[float]:
        """Log-probability of each choice, normalized over the choices.

        Args:
          edge_logprobs: natural log-probability of each of `edges()`, in that order.
        """
        logprobs = dict(zip(self.edges(), edge_logprobs, strict=True))
        reach = [0.0] * len(self.nodes)
        ends = [-math.inf] * self.num_choices
        for index, node in enumerate(self.nodes):
            if node.parent >= 0:
                reach[index] = reach[node.parent] + logprobs[(node.parent, node.token_id)]
            if node.choice is not None:
                taken = math.fsum(math.exp(logprobs[(index, token)]) for token in node.children)
                left = 1.0 - taken if node.children else 1.0
                ends[node.choice] = reach[index] + (math.log(left) if left > 0 else -math.inf)
        peak = max(ends)
        total = peak + math.log(math.fsum(math.exp(end - peak) for end in ends))
        return [end - total for end in ends]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreePart:
    """Some nodes of a choice tree as tokens behind the question, without the root.

    Attributes:
      nodes: their indices in the tree.
      token_ids: the token of each.
      depths: how far each stands behind the question's last token.
      parents: index within this part of each one's parent; -1 = the question's last token.
      wanted: indices within this part whose distributions are wanted.
    """

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    parents: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def wanted_nodes(self) -> tuple[int, ...]:
        """Tree nodes whose distributions are wanted, in the order of `wanted`."""
        return tuple(self.nodes[index] for index in self.wanted)


def tree_parts(tree: ChoiceTree, max_wanted: int, max_tokens: int) -> list[TreePart]:
    """Split the branching nodes below the root into parts that fit a step, with their ancestors.

    Raises:
      InputError: a choice is longer than a step.
    """
    parts: list[TreePart] = []
    wanted: list[int] = []
    members: set[int] = set()

    def ancestry(node: int) -> set[int]:
        chain = set()
        while node > 0:
            chain.add(node)
            node = tree.nodes[node].parent
        return chain

    def flush():
        if not wanted:
            return
        nodes = tuple(sorted(members))
        place = {node: index for index, node in enumerate(nodes)}
        parts.append(
            TreePart(
                nodes=nodes,
                token_ids=tuple(tree.nodes[node].token_id for node in nodes),
                depths=tuple(tree.nodes[node].depth for node in nodes),
                parents=tuple(place.get(tree.nodes[node].parent, -1) for node in nodes),
                wanted=tuple(place[node] for node in wanted),
            )
        )
        wanted.clear()
        members.clear()

    for node in tree.branching:
        if node == 0:
            continue
        chain = ancestry(node)
        if len(chain) > max_tokens:
            raise InputError(
                f"choices: expected at most {max_tokens} tokens each, got {len(chain) + 1}"
            )
        if len(wanted) == max_wanted or len(members | chain) > max_tokens:
            flush()
        members |= chain
        wanted.append(node)
    flush()
    return parts
