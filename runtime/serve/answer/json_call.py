"""Tool calls in JSON that come in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from .json_scan import ObjectScan, ValueSpan, decoded, is_object
from .part_list import PartList
from .tags import find_tag


class BareArguments:
    """The arguments of a call whose name came before.

    Args:
        found: to add to.

    Attributes:
        has_begun: it is a call.
    """

    def __init__(self, found: PartList) -> None:
        self._found = found
        self._scan = ObjectScan()
        self.has_begun = True

    @property
    def is_over(self) -> bool:
        """Whether no more text belongs to it."""
        return self._scan.is_over

    @property
    def is_whole(self) -> bool:
        """Whether it is a call that has ended with its last brace."""
        return self.has_begun and self._scan.is_ended

    @property
    def is_unfinished(self) -> bool:
        """Whether it is a call whose arguments have not ended."""
        return not self._scan.is_ended

    @property
    def in_string(self) -> bool:
        """Whether the next character is inside a string."""
        return self._scan.in_string

    def add(self, text: str) -> int:
        """Read on, and return how many characters of ``text`` belong to it."""
        taken = self._scan.add(text)
        self._found.arguments(text[:taken])
        return taken

    def end(self) -> None:
        """No more text belongs to it: what did not become a call is content."""


class JsonCall(BareArguments):
    """An object with a name and arguments, or what may become one.

    It is a call once its name and the first brace of its arguments are known, in either order. Arguments may also be a
    string that contains an object; null, an empty string and no arguments at all are ``{}``.

    Args:
        found: to add to.
        prefix: what precedes the object and is content if there is no call.
        keys: of which the first that occurs has the arguments.
        needs_arguments: without any it is no call.
    """

    def __init__(
        self, found: PartList, prefix: str, keys: Sequence[str] = ("arguments",), *, needs_arguments: bool = False
    ) -> None:
        super().__init__(found)
        self._prefix = prefix
        self._keys = keys
        self._needs_arguments = needs_arguments
        self._arguments: ValueSpan | None = None
        self._sent = 0  # where in the object the next arguments are
        self.has_begun = False

    @property
    def is_unfinished(self) -> bool:
        """Whether it is a call whose arguments have not ended."""
        return self._arguments is not None and self._arguments.end is None

    def add(self, text: str) -> int:
        """Read on, and return how many characters of ``text`` belong to it."""
        taken = self._scan.add(text)
        if not self.has_begun:
            self._look()
        if self._arguments is not None:
            more = self._scan.text[self._sent : self._arguments.end]
            self._found.arguments(more)
            self._sent += len(more)
        return taken

    def end(self) -> None:
        """No more text belongs to it: what did not become a call is content."""
        if not self.has_begun:
            self._found.content(self._prefix + self._scan.text)

    def _look(self) -> None:
        """Begin the call if enough is known. No text that follows makes that wrong, so it does not matter when."""
        scan = self._scan
        named = scan.values.get("name")
        name = None if named is None or named.end is None else decoded(scan.text[named.start : named.end])
        if not name:
            return
        given = next((span for key, span in scan.values.items() if key in self._keys), None)
        whole = None
        if given is None:
            whole = "{}" if scan.is_ended and not self._needs_arguments else None
        elif scan.text[given.start] == "{":
            self._arguments = given
            self._sent = given.start
        elif given.end is not None:
            whole = _object_of(scan.text[given.start : given.end])
        if self._arguments is not None or whole is not None:
            self.has_begun = True
            self._found.start(name)
            self._found.arguments(whole or "")


def read_call(call: BareArguments, text: str, tags: Sequence[str], *, is_last: bool) -> tuple[str, bool]:
    """Give a call its text: up to its last brace, to where it is no JSON, or to a tag that is not inside a string.

    Args:
        call: to read.
        text: what has come.
        tags: that end it.
        is_last: no text follows.

    Returns:
        The text that it did not take, and whether it is over.
    """
    while text:
        at, tag = find_tag(text, tags, is_last=is_last)
        text = text[call.add(text[:at]) :]
        if call.is_over:
            return text, True
        if not tag:
            return text, False
        if not call.in_string:
            return text, True
        call.add(tag)
        text = text[len(tag) :]
    return text, False


def _object_of(literal: str) -> str | None:
    """The arguments that a value other than an object stands for; None if for none."""
    text = "" if literal == "null" else decoded(literal)
    if text is None or (text and not is_object(text)):
        return None
    return text or "{}"
