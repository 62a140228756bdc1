"""What measures a model's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...requests.output import RequestOutput
from ...requests.params import SamplingParams

Watch = Callable[[RequestOutput], object]


class Observer(Protocol):
    """Sees the requests of one model."""

    def watch(self, name: str, prompts: Sequence[list[int]], params: SamplingParams) -> Sequence[Watch]:
        """Called with each request before it is queued. It may still be refused: then there are no outputs.

        Args:
            name: of the request.
            prompts: the tokens of each.
            params: for each.

        Returns:
            For each prompt, what is called with its outputs, in the asyncio loop. The last one is finished, also if
            the client went away.
        """
        ...
