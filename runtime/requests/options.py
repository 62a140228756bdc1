"""What a request may ask of the engine besides its sampling parameters."""

from __future__ import annotations

from typing import TypedDict


class RequestOptions(TypedDict, total=False):
    """Keywords of the engine's methods that take a prompt.

    Attributes:
        priority: lower numbers go first, under the policy ``priority``.
        deadline: seconds from its arrival after which nobody wants its output: it ends then with the reason ``deadline``,
            finished or not. Under the policy ``deadline`` the earliest goes first. None by default.
        predicted_tokens: how many tokens are expected, for policies and an admission that predict; None if unknown.
        adapter: the LoRA adapter that changes the model for it, by the name under which it was loaded; None for none.
    """

    priority: int
    deadline: float | None
    predicted_tokens: int | None
    adapter: str | None
