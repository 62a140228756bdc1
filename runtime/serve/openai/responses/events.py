"""An answer's items as they grow, and the events of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...answer.parts import CallArguments, CallStart, Content, Part, Reasoning
from .items import AnswerItem, Call, OutputItem, Status, Thought

Event = dict[str, Any]


class OutputItems:
    """The items of one answer. One is open at a time; it ends where the next begins.

    Attributes:
        items: in order.
        is_open: whether the last has not ended.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self.is_open = False
        self._held: Sequence[dict[str, Any]] = ()  # of tokens whose text has not come

    @property
    def last(self) -> OutputItem | None:
        """The item that is open, if one is."""
        return self.items[-1] if self.is_open else None

    def grow(self, parts: Sequence[Part], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Parts that have come, with the log probabilities of their tokens, which only text has a place for."""
        # What is held after another item is the tag that ends it.
        logprobs = [*self._held, *logprobs] if isinstance(self.last, AnswerItem | None) else logprobs
        self._held = [] if parts else logprobs
        for part in parts:
            yield from self._add(part, logprobs)
            if isinstance(part, Content):
                logprobs = []

    def _add(self, part: Part, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        match part:
            case Content(text):
                if not isinstance(self.last, AnswerItem):
                    yield from self._start(AnswerItem())
                yield from self._grow(text, logprobs)
            case Reasoning(text):
                if not isinstance(self.last, Thought):
                    yield from self._start(Thought())
                yield from self._grow(text)
            case CallStart(_, id, name):
                yield from self._start(Call(id, name))
            case CallArguments(_, text):
                yield from self._grow(text)

    def end(self, status: Status) -> Iterator[Event]:
        """Nothing follows. An answer without anything is an empty message.

        Args:
            status: of the last item.
        """
        if not self.items:
            yield from self._start(AnswerItem())
        yield from self._close(status)

    def forms(self, status: Status) -> list[dict[str, Any]]:
        """The items as they are in a response.

        Args:
            status: of the last one.
        """
        return [*(item.form("completed") for item in self.items[:-1]), *(item.form(status) for item in self.items[-1:])]

    @property
    def reasoning(self) -> str:
        """All of it."""
        return "".join(item.text for item in self.items if isinstance(item, Thought))

    def _start(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self.items.append(item)
        self.is_open = True
        yield self._event("response.output_item.added", item=item.form("in_progress"))
        if not isinstance(item, Call):
            yield self._event("response.content_part.added", item_id=item.id, content_index=0, part=item.part())

    def _grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        item = self.items[-1]
        item.text += text
        if isinstance(item, AnswerItem):
            item.logprobs += logprobs
        if text or logprobs:
            yield self._event(f"{_kind(item)}.delta", **_place(item), delta=text, **_logprobs(item, logprobs))

    def _close(self, status: Status) -> Iterator[Event]:
        item = self.last
        if item is None:
            return
        self.is_open = False
        kind = _kind(item)
        if isinstance(item, Call):
            yield self._event(f"{kind}.done", **_place(item), name=item.name, arguments=item.text)
        else:
            logprobs = item.logprobs if isinstance(item, AnswerItem) else ()
            yield self._event(f"{kind}.done", **_place(item), text=item.text, **_logprobs(item, logprobs))
            yield self._event("response.content_part.done", **_place(item), part=item.part())
        yield self._event("response.output_item.done", item=item.form(status))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}


def _kind(item: OutputItem) -> str:
    match item:
        case AnswerItem():
            return "response.output_text"
        case Thought():
            return "response.reasoning_text"
        case Call():
            return "response.function_call_arguments"


def _place(item: OutputItem) -> dict[str, Any]:
    # A call's arguments are no content.
    return {"item_id": item.id} if isinstance(item, Call) else {"item_id": item.id, "content_index": 0}


def _logprobs(item: OutputItem, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"logprobs": [*logprobs]} if isinstance(item, AnswerItem) else {}
