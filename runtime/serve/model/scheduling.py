"""What a request's body may say in every API: of its scheduling, and how many stops."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from ...requests.options import RequestOptions

_LONGEST_DEADLINE = 86400.0
# Every token's text is compared with each stop.
MOST_STOPS, LONGEST_STOP = 64, 1024


class SchedulingFields(BaseModel):
    """Fields that no API of OpenAI's or Anthropic's has.

    Attributes:
        priority: vLLM's; lower numbers go first, under the policy ``priority``.
        deadline: Smelt's; seconds after which nobody wants the answer.
    """

    priority: int = 0
    deadline: Annotated[float, Field(gt=0, le=_LONGEST_DEADLINE)] | None = None

    @property
    def options(self) -> RequestOptions:
        """How the engine schedules it."""
        return {"priority": self.priority, "deadline": self.deadline}
