"""What the runtime refuses, in a sentence for its user."""

from __future__ import annotations


class RuntimeProblem(ValueError):  # noqa: N818 - it is told, not debugged
    """A checkpoint, an option or a request that cannot be served; the message says what, where and what to do."""
