"""Windows of token ids cut from text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...system.errors import SmeltError
from .chat_template import conversation_tokens
from .text_source import TextSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A seed chooses among this many times the requested windows; the rest of a huge source is not read.
_CHOICE = 16
_SHORTEST = 2  # window that a recipe may ask for
_SEPARATOR = "\n\n"
# Characters given to the tokenizer at once. It takes about fifty times the memory of its text.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Windows:
    """Token ids ``[windows, length]`` and the digest that identifies them."""

    tokens: Tensor
    fingerprint: str

    def first(self, count: int) -> Windows:
        """The first of them."""
        return _fingerprinted(self.tokens[:count])

    def chosen(self, numbers: list[int]) -> Windows:
        """Some of them, in the order of the numbers."""
        return _fingerprinted(self.tokens[numbers])


def calibration_windows(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int
) -> Windows:
    """Windows that a seed chooses among the source's first ones. They do not overlap.

    Raises:
        SmeltError: the source has fewer than ``samples`` windows of ``length`` tokens.
    """
    begin = beginning(tokenizer)
    own = length - len(begin)
    stream = _tokens(source, tokenizer, begin, samples * own * _CHOICE)
    available = len(stream) // own
    if available < samples:
        raise SmeltError(
            f"{source.label}: too short: {samples} samples of {length} tokens need {samples * own} tokens,"
            f" it has {len(stream)}; {_fewer(available, len(stream) // samples + len(begin))}give more text"
        )
    windows = _begun(stream[: available * own].view(available, own), begin)
    chosen = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    return _fingerprinted(windows[chosen])


def evaluation_windows(source: TextSource, tokenizer: PreTrainedTokenizerBase, most: int, length: int) -> Windows:
    """The source's first windows, as many as there are up to ``most``."""
    begin = beginning(tokenizer)
    own = length - len(begin)
    stream = _tokens(source, tokenizer, begin, most * own)
    available = min(most, len(stream) // own)
    if available == 0:
        raise SmeltError(
            f"{source.label}: too short: it has {len(stream)} tokens, less than one window of {length};"
            " lower length or give more text"
        )
    return _fingerprinted(_begun(stream[: available * own].view(available, own), begin))


def used_tokens(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All tokens that a source is cut into, from its beginning to its end.

    Raises:
        SmeltError: it holds no text.
    """
    used = set(tokenizer("").input_ids)  # what is added to any text
    for piece in token_pieces(source, tokenizer):
        used.update(piece)
    return used | set(tokenizer(_SEPARATOR, add_special_tokens=False).input_ids)


def recut(tokens: Tensor, before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase) -> Tensor:
    """The same number and length of windows of the same text, with another tokenizer."""
    begin, old = beginning(after), len(beginning(before))
    own = tokens.shape[1] - len(begin)
    ids: list[int] = []
    for text in before.batch_decode(tokens[:, old:], clean_up_tokenization_spaces=False):
        ids.extend(after(text, add_special_tokens=False, verbose=False).input_ids)
    short = len(tokens) * own - len(ids)
    if short > 0:  # text that is decoded and tokenized again may be a little shorter
        ids.extend((ids * (short // len(ids) + 1))[:short])
    return _begun(torch.tensor(ids[: len(tokens) * own]).view(len(tokens), own), begin)


def fingerprint(tokens: Tensor) -> str:
    """A digest of token ids."""
    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + tokens.to(torch.int64).numpy().tobytes()).hexdigest()


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS token that the tokenizer adds, for models (Llama, Gemma) that were trained with one."""
    ids, bos = tokenizer("a").input_ids, tokenizer.bos_token_id
    return [bos] if isinstance(bos, int) and ids[:1] == [bos] else []


def _begun(windows: Tensor, begin: list[int]) -> Tensor:
    return (
        torch.cat((torch.tensor([begin], dtype=torch.int64).expand(len(windows), -1), windows), dim=1)
        if begin
        else windows
    )


def _fingerprinted(tokens: Tensor) -> Windows:
    return Windows(tokens.contiguous(), fingerprint(tokens))


def _fewer(samples: int, length: int) -> str:
    """A hint for too little text: fewer samples of this length, or the same number of shorter ones; empty if neither fits."""
    if samples:
        return f"ask for {samples} samples or "
    return f"ask for a length of at most {length} or " if length >= _SHORTEST else ""


def token_pieces(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """A source's tokens, as its text is read: documents with a separator between them, conversations as the model's template writes them.

    Raises:
        SmeltError: it holds no text, or conversations that cannot be written.
    """
    separator = tokenizer(_SEPARATOR, add_special_tokens=False).input_ids
    empty = after_text = True
    for document in source.documents():
        is_text = isinstance(document, str)
        if is_text and not document.strip():
            continue
        if is_text and after_text and not empty:
            yield list(separator)
        empty, after_text = False, is_text
        if not is_text:
            yield conversation_tokens(tokenizer, messages_in(document, tokenizer, source), answer=False)
            continue
        for piece in text_pieces(document):
            yield tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
    if empty:
        raise SmeltError(f"{source.label}: holds no text; give a source with text in it")


def messages_in(document: Any, tokenizer: PreTrainedTokenizerBase, source: TextSource) -> list[dict[str, Any]]:
    """What a source holds instead of text, if it is a conversation that the model's template can write.

    Raises:
        SmeltError: it is not.
    """
    where = f"{source.name}: field {source.field!r}"
    if not isinstance(document, list):
        raise SmeltError(f"{where} holds {type(document).__name__}, not text; set field")
    if not all(isinstance(each, dict) and "role" in each for each in document):
        raise SmeltError(f"{where} holds a list that is not of messages with roles; set field")
    if not getattr(tokenizer, "chat_template", None):
        raise SmeltError(f"{source.name}: holds messages, and the model has no chat template to write them; give texts")
    return document


def _tokens(source: TextSource, tokenizer: PreTrainedTokenizerBase, begin: list[int], enough: int) -> Tensor:
    ids: list[int] = []
    for piece in token_pieces(source, tokenizer):
        # A template may begin as the first window does.
        ids.extend(piece if ids or not begin or piece[: len(begin)] != begin else piece[len(begin) :])
        if len(ids) >= enough:
            break
    return torch.tensor(ids[:enough], dtype=torch.int64)


def text_pieces(document: str) -> Iterator[str]:
    """A long document in pieces that begin with a line, or with a word where lines are long."""
    start = 0
    while len(document) - start > _PIECE:
        cut = max(document.rfind("\n", start, start + _PIECE) + 1, start)
        if cut == start:
            cut = document.rfind(" ", start + 1, start + _PIECE)
        if cut <= start:
            cut = start + _PIECE
        yield document[start:cut]
        start = cut
    yield document[start:]
