"""Drafts that are right with a given probability, after all the work of a drafter: random weights say nothing of acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from smelt.runtime import Engine
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.scheduling.plan import Chunk, StepPlan
from smelt.runtime.speculation.drafter import Chains, Drafter, Drafts
from smelt.runtime.speculation.lookup import LookupDrafter, parts_of
from smelt.runtime.speculation.tree import DraftBranch, TokenTree


@dataclass(frozen=True)
class Acceptance:
    """How often drafts are right.

    Attributes:
        share: of a chain's tokens, if those before them are.
        caught: of one of the branches that begin where the chain is wrong.
    """

    share: float
    caught: float = 0.0


class ForcedDrafter:
    """Does a drafter's work, and has other tokens. Lookup drafts as many as it may, as if it always found some.

    Args:
        drafter: the drafter.
        outputs: the right tokens, by prompt.
        acceptance: how often to be right.
    """

    def __init__(self, drafter: Drafter, outputs: dict[tuple[int, ...], list[int]], acceptance: Acceptance) -> None:
        self._drafter, self._outputs, self._acceptance = drafter, outputs, acceptance
        self.longest_branch = drafter.longest_branch
        self._draw = random.Random(0)

    def unprepared(self, sequence: Sequence) -> int:
        """As many as the drafter's."""
        return self._drafter.unprepared(sequence)

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """As the drafter does."""
        self._drafter.replaced(sequence, block, by)

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Right and wrong tokens in the place of the drafter's."""
        drafts = self._drafter.propose(plan, chains)
        if isinstance(self._drafter, LookupDrafter):
            drafts.of.update({chunk.sequence: _found(chunk) for chunk in plan.chunks if chunk.drafts})
        for sequence, tree in drafts.of.items():
            known = self._outputs[tuple(sequence.request.prompt)][len(sequence.generated) :]
            right = known + [0] * (2 * len(tree.chain))
            self._fill(tree, right)
        return drafts

    def _fill(self, tree: TokenTree, right: list[int]) -> None:
        share = self._acceptance.share
        for i in range(len(tree.chain)):
            tree.chain[i] = right[i] if self._draw.random() < share else _wrong(right[i], 1)
        agreeing = next((i for i, token in enumerate(tree.chain) if token != right[i]), None)
        # Whether any of the branches at that place is right; which one makes no difference.
        caught = self._draw.random() < self._acceptance.caught
        for number, branch in enumerate(tree.branches):
            catches = caught and branch.after == agreeing
            caught = caught and not catches
            for i in range(len(branch.tokens)):
                token = right[branch.after + i]
                is_right = catches and (i == 0 or self._draw.random() < share)
                branch.tokens[i] = token if is_right else _wrong(token, 2 + number)


def force(engine: Engine, prompts: SequenceOf[list[int]], outputs: list[list[int]], acceptance: Acceptance) -> None:
    """Let an engine's drafter be right so often.

    Args:
        engine: with a drafter.
        prompts: that it will get.
        outputs: what it says without drafts.
        acceptance: how often.
    """
    assert engine.drafter is not None
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, outputs, strict=True)}
    engine.executor._drafter = ForcedDrafter(engine.drafter, known, acceptance)  # type: ignore[attr-defined]


def _found(chunk: Chunk) -> TokenTree:
    parts = parts_of(chunk.branched, len(chunk.spare)) if chunk.spare else []
    return TokenTree([0] * chunk.drafts, [DraftBranch(0, [0] * part) for part in parts if part])


def _wrong(token: int, by: int) -> int:
    return (token + by) % 1000
