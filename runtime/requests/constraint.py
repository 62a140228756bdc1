"""What an output must look like, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Matcher(Protocol):
    """How far one output has come."""

    def forbid(self, row: Tensor) -> None:
        """Set the logits of tokens that may not follow to minus infinity.

        Args:
            row: float32 ``[vocabulary]`` on the CPU, changed in place.
        """
        ...

    def accept(self, token: int) -> None:
        """Go on by a token."""
        ...

    def copy(self) -> Matcher:
        """Another one that has come as far."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the output cannot be followed any further, if so."""
        ...


class Constraint(Protocol):
    """A compiled grammar, for any number of outputs."""

    def start(self) -> Matcher:
        """At the beginning of an output."""
        ...
