"""A training text's tokens, with which of them are to be learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...models.text.chat_template import conversation_text
from ...models.text.text_source import TextSource
from ...models.text.windows import beginning, text_pieces, token_pieces
from ...system.errors import SmeltError


class Piece(NamedTuple):
    """Some tokens in a row.

    Attributes:
        ids: of them.
        learned: whether the model learns to write them; others are only read.
    """

    ids: list[int]
    learned: bool = True


def example_pieces(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """A source's tokens, as its text is read. Documents end with the end-of-sequence token, so that a model learns to stop.

    Args:
        source: of documents, of conversations (lists of messages), or of prompts and completions.
        tokenizer: the model's.

    Raises:
        SmeltError: it holds no text, or the model has no chat template.
    """
    if source.completion is not None and (source.is_one_document or source.name == "builtin"):
        raise SmeltError(
            f"{source.label}: has no prompts and completions; give JSONL or a dataset that has, or remove completion"
        )
    if source.is_one_document:
        yield from map(Piece, token_pieces(source, tokenizer))
        return
    end = tokenizer.eos_token_id
    between = [end, *beginning(tokenizer)] if isinstance(end, int) else _tokens(tokenizer, "\n\n")
    empty = True
    for pieces in _by_example(source, tokenizer, between):
        if pieces:
            empty = False
            yield from pieces
    if empty:
        raise SmeltError(f"{source.label}: holds no text; give a source with text in it")


def _by_example(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, between: list[int]
) -> Iterator[Iterator[Piece] | list[Piece]]:
    completion = source.completion
    for record in source.records(source.field, *(() if completion is None else (completion,))):
        given = record[0]
        wrong = next((each for each in record if not isinstance(each, str)), None)
        if completion is not None:
            if wrong is not None:
                raise SmeltError(
                    f"{source.name}: field {source.field!r} or {completion!r} holds {type(wrong).__name__}, not text; set"
                    " field and completion"
                )
            yield [
                Piece(_tokens(tokenizer, given), learned=False),
                Piece([*_tokens(tokenizer, record[1]), *between[:1]]),
                Piece(between[1:], learned=False),
            ]
        elif isinstance(given, list):
            yield _conversation(source, tokenizer, given)
        elif wrong is not None:
            raise SmeltError(f"{source.name}: field {source.field!r} holds {type(given).__name__}, not text; set field")
        elif given.strip():
            yield _document(given, tokenizer, between)


def _document(text: str, tokenizer: PreTrainedTokenizerBase, between: list[int]) -> Iterator[Piece]:
    for piece in text_pieces(text):
        yield Piece(_tokens(tokenizer, piece))
    yield Piece(between)


def _conversation(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> list[Piece]:
    """Messages as the model's template writes them. Those of the assistant are learned, from where the model would begin."""
    if not getattr(tokenizer, "chat_template", None):
        raise SmeltError(f"{source.name}: holds messages, and the model has no chat template to write them; give texts")
    if not all(isinstance(each, dict) and "role" in each for each in messages):
        raise SmeltError(
            f"{source.name}: field {source.field!r} holds a list that is not of messages with roles; set field"
        )
    whole = conversation_text(tokenizer, messages, answer=False)
    pieces: list[Piece] = []
    done = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = conversation_text(tokenizer, messages[:i])
        after = conversation_text(tokenizer, messages[: i + 1], answer=False)
        # Some templates write earlier answers otherwise than the last one: without what the model thought.
        if not (whole.startswith(before) and whole.startswith(after) and len(before) <= len(after)):
            continue
        pieces += [
            Piece(_tokens(tokenizer, whole[done : len(before)]), learned=False),
            Piece(_tokens(tokenizer, whole[len(before) : len(after)])),
        ]
        done = len(after)
    if not pieces:
        raise SmeltError(
            f"{source.name}: nothing of a conversation can be learned: it has no answer of the assistant, or the chat"
            " template writes it otherwise than it would begin one; give prompts and completions as text"
        )
    return [*pieces, Piece(_tokens(tokenizer, whole[done:]), learned=False)]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids if text else []
