"""What the runtime refuses, in a sentence for its user."""

from __future__ import annotations

from ..system.errors import SmeltError


class RuntimeProblem(SmeltError, ValueError):  # noqa: N818 - public, and a sentence for a person
    """A checkpoint, an option or a request that cannot be served; the message says what, where and what to do."""
