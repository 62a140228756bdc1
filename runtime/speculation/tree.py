"""Token trees: a chain of draft tokens with branches, all verified in one step (SpecInfer, Miao et al., arXiv:2305.09781).

A branch is a run of its own in the step, with blocks of its own from where it leaves the chain: the block that its first token falls into
is a spare one, to which what the chain has there is copied or written twice. So attention needs no mask of the tree, each of its tokens has
the numbers that it would have alone, and a branch that proves right gives its block to the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from ..decoder.parts.batch import Run


@dataclass(frozen=True)
class DraftBranch:
    """Tokens that may come instead of those of a chain.

    Attributes:
        after: how many of the chain's tokens are before them.
        tokens: at least one; the first one is another than the chain's.
    """

    after: int
    tokens: list[int]


@dataclass(frozen=True)
class TokenTree:
    """A draft of one sequence.

    Attributes:
        chain: the tokens that are most likely to come next.
        branches: others.
        odds: of what came second against each of the chain's tokens, from 0 to 1; empty if the drafter has none.
    """

    chain: list[int]
    branches: SequenceOf[DraftBranch] = ()
    odds: SequenceOf[float] = ()

    @property
    def branched(self) -> int:
        """How many tokens are on branches."""
        return sum(len(branch.tokens) for branch in self.branches)

    def drafted_at_once(self) -> list[int]:
        """How many of its tokens a drafter chooses in each of its steps: second choices come with the first ones."""
        spans = [(0, len(self.chain)), *((each.after + 1, len(each.tokens) - 1) for each in self.branches)]
        steps = max(start + count for start, count in spans)
        return [sum(start <= step < start + count for start, count in spans) for step in range(steps)]

    def children(self) -> dict[tuple[int, int], int]:
        """From a node and a token to the node with it: 0 is the sequence's last token, the chain's nodes and then the branches' follow."""
        found = {(node, token): node + 1 for node, token in enumerate(self.chain)}
        node = len(self.chain)
        for branch in self.branches:
            before = branch.after
            for token in branch.tokens:
                node += 1
                found.setdefault((before, token), node)
                before = node
        return found

    def branch_at(self, node: int) -> int | None:
        """Which branch a node is on; None for the chain."""
        node -= len(self.chain) + 1
        if node < 0:
            return None
        for i, branch in enumerate(self.branches):
            if node < len(branch.tokens):
                return i
            node -= len(branch.tokens)
        raise IndexError("the tree has no such node")

    def path_length(self, node: int) -> tuple[int, int]:
        """How many tokens of the chain lead to a node, and how many of a branch."""
        at = self.branch_at(node)
        if at is None:
            return node, 0
        before = len(self.chain) + sum(len(branch.tokens) for branch in self.branches[:at])
        return self.branches[at].after, node - before

    def within(self, start: int, block_size: int, spare: int, longest: int) -> TokenTree:
        """As much of it as there are places for: each branch stays in the spare block that it begins in.

        Args:
            start: the position of the sequence's last token.
            block_size: positions in a block.
            spare: how many blocks there are.
            longest: how many tokens after that one may be computed.
        """
        kept = []
        for branch in self.branches[:spare]:
            first = start + 1 + branch.after
            room = min(block_size - first % block_size, longest - branch.after)
            kept.append(replace(branch, tokens=branch.tokens[:room]))
        return replace(self, branches=kept)


@dataclass(frozen=True)
class TreeRuns:
    """The runs that compute a tree.

    Attributes:
        runs: of the chain, then of each branch; the rows of logits are in the order of the nodes.
        copies: blocks to copy before, ``(from, to)``.
        places: for each branch, which of the sequence's blocks its spare one would replace.
    """

    runs: list[Run]
    copies: list[tuple[int, int]]
    places: list[int]

    @classmethod
    def of(cls, run: Run, tree: TokenTree, spare: SequenceOf[int], block_size: int) -> TreeRuns:
        """Lay out a tree.

        Args:
            run: of the sequence's last token, with blocks for the chain, too.
            tree: its draft, already :meth:`~TokenTree.within` its spare blocks.
            spare: a block for each branch.
            block_size: positions in a block.
        """
        copies, places, branches, also = [], [], [], []
        for branch, block in zip(tree.branches, spare, strict=False):
            first = run.start + 1 + branch.after
            place = first // block_size
            begin = place * block_size
            if begin < run.start:
                copies.append((run.blocks[place], block))
            for position in range(max(begin, run.start), first):
                also.append((position - run.start, block * block_size + position - begin))
            places.append(place)
            blocks = [*run.blocks[:place], block]
            branches.append(
                replace(run, tokens=branch.tokens, start=first, blocks=blocks, wants=len(branch.tokens), decodes=True)
            )
        tokens = run.tokens + tree.chain
        main = replace(run, tokens=tokens, wants=run.wants + len(tree.chain), decodes=True, also=tuple(also))
        return cls([main, *branches], copies, places)
