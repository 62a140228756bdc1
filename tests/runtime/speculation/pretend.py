"""A drafter that knows the answers, and gives them away on chains and on branches."""

from __future__ import annotations

import random

from smelt.runtime import Engine
from smelt.runtime.requests.output import RequestOutput
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.speculation.drafter import Chains, Drafts
from smelt.runtime.speculation.lookup_first import LookupFirst
from smelt.runtime.speculation.tree import DraftBranch, TokenTree


class PretendDrafter:
    """Half of its chains' tokens are right, and half of its branches.

    Args:
        outputs: what the model says without drafts.
    """

    longest_branch: int | None = None

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self._known = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}
        self._draw = random.Random(0)

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Chains and branches."""
        found = {}
        for chunk in plan.chunks:
            if chunk.drafts:
                sequence = chunk.sequence
                right = self._known[tuple(sequence.request.prompt)][len(sequence.generated) :] + [3] * chunk.drafts
                chain = [self._maybe(token) for token in right[: chunk.drafts]]
                branches = []
                for _ in chunk.spare:
                    after = self._draw.randrange(len(chain))
                    length = max(1, chunk.branched // len(chunk.spare))
                    branches.append(DraftBranch(after, [self._maybe(token) for token in right[after:][:length]]))
                found[sequence] = TokenTree(chain, [each for each in branches if each.tokens[0] != chain[each.after]])
        return Drafts(found)

    def _maybe(self, token: int) -> int:
        return token if self._draw.random() < 0.5 else token ^ 1

    def unprepared(self, sequence: Sequence) -> int:
        """None."""
        return 0

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """Nothing."""


class PretendLookup(PretendDrafter):
    """Finds something for half of the tokens of a sequence."""

    def matched(self, sequence: Sequence) -> int:
        """So many that a fixed number is drafted."""
        return 8 * ((len(sequence.tokens) // 4 + sequence.request.prompt[0]) % 2)

    def share(self, sequence: Sequence) -> float:
        """Half, where it finds something."""
        return self.matched(sequence) / 16


def pretend_lookup(engine: Engine, outputs: list[RequestOutput]) -> None:
    """Let an engine that looks drafts up before others draft be given these instead."""
    first, lookup = engine.drafter, PretendLookup(outputs)
    assert isinstance(first, LookupFirst)
    first.lookup = lookup  # type: ignore[assignment]
    engine.drafting._lookup = lookup  # type: ignore[union-attr]


def pretend(engine: Engine, outputs: list[RequestOutput]) -> None:
    """Let an engine that looks drafts up be given these."""
    engine.executor.drafter = PretendDrafter(outputs)  # type: ignore[attr-defined]
