"""A training text's tokens, with which of them are to be learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...models.text.chat_template import conversation_tokens
from ...models.text.text_source import TextSource
from ...models.text.windows import beginning, messages_in, text_pieces, token_pieces
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
    learned = False
    for pieces in _by_example(source, tokenizer, between):
        for piece in pieces:
            learned |= piece.learned
            yield piece
    if not learned:
        plain = source.completion is None and source.field == "text"
        what = (
            "text; give a source with text in it"
            if plain
            else "text that can be learned; give answers of an assistant, or completions"
        )
        raise SmeltError(f"{source.label}: holds no {what}")


def _by_example(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, between: list[int]
) -> Iterator[Iterable[Piece]]:
    """Each document's pieces; of what nothing can be learned, none."""
    completion = source.completion
    for record in source.records(source.field, *(() if completion is None else (completion,))):
        given = record[0]
        wrong = [each for each in record if not isinstance(each, str)]
        if completion is not None:
            if wrong:
                raise SmeltError(
                    f"{source.name}: field {source.field!r} or {completion!r} holds {type(wrong[0]).__name__}, not text;"
                    " set field and completion"
                )
            if record[1].strip():
                yield _completion(given, record[1], tokenizer, between)
        elif wrong:
            yield from _conversation(tokenizer, messages_in(given, tokenizer, source))
        elif given.strip():
            yield _document(given, tokenizer, between)


def _document(text: str, tokenizer: PreTrainedTokenizerBase, between: list[int]) -> Iterator[Piece]:
    for piece in text_pieces(text):
        yield Piece(_tokens(tokenizer, piece))
    yield Piece(between)


def _completion(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase, between: list[int]) -> list[Piece]:
    # In one piece, as the model will read it: some tokenizers put a space before what they are given.
    whole = _tokens(tokenizer, prompt + answer)
    begun = _common(_tokens(tokenizer, prompt), whole)
    return [
        Piece(whole[:begun], learned=False),
        Piece([*whole[begun:], *between[:1]]),
        Piece(between[1:], learned=False),
    ]


def _conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> Iterator[list[Piece]]:
    """Messages as the model's template writes them; the assistant's are learned, from where the model would begin.

    Some templates write earlier answers otherwise than the last one. Such an answer is an example of its own, with what comes before it.
    """
    answers = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i > 0]
    whole = conversation_tokens(tokenizer, messages, answer=False) if answers else []
    pieces: list[Piece] = []
    done = 0
    for i in answers:
        before = conversation_tokens(tokenizer, messages[:i])
        after = conversation_tokens(tokenizer, messages[: i + 1], answer=False)
        begun = _common(before, after)
        if begun < len(before) - 1:  # the last one may be longer with the answer
            continue
        if whole[: len(after)] == after:
            pieces += [Piece(whole[done:begun], learned=False), *_answer(tokenizer, after[begun:])]
            done = len(after)
        else:
            yield [Piece(after[:begun], learned=False), *_answer(tokenizer, after[begun:])]
    if pieces:
        yield [*pieces, Piece(whole[done:], learned=False)]


def _answer(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[Piece]:
    """What is learned of an answer: not the line breaks after its end, which are never generated."""
    stop = len(ids)
    while stop > 1 and not str(tokenizer.decode(ids[stop - 1])).strip():
        stop -= 1
    return [Piece(ids[:stop]), Piece(ids[stop:], learned=False)]


def _common(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids if text else []
