"""How many bytes of text each token stands for: whole texts cannot be decoded where a window cuts a character."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's


def bytes_of(tokens: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The bytes of each row's text in UTF-8, special tokens left out.

    Args:
        tokens: ``[rows, tokens]``.
        tokenizer: that has made them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    data = {} if backend is None else json.loads(backend.to_str())
    steps = json.dumps([data.get("pre_tokenizer"), data.get("decoder")], ensure_ascii=False)
    is_bytes = '"ByteLevel"' in steps
    if not is_bytes and _SPACE not in steps:  # pieces do not say where words are joined
        texts = tokenizer.batch_decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [len(text.encode()) for text in texts]
    names = tokenizer.convert_ids_to_tokens(list(range(max(len(tokenizer), int(tokens.max()) + 1))))
    added = tokenizer.added_tokens_decoder
    sizes = [0] * len(names)
    for token, name in enumerate(names):
        if name is not None and not is_bytes and _BYTE.fullmatch(name):
            sizes[token] = 1
        elif token in added:
            sizes[token] = 0 if added[token].special else len(added[token].content.encode())
        elif name is None:
            continue
        elif is_bytes:  # a letter a byte
            sizes[token] = len(name)
        else:
            sizes[token] = len(name.replace(_SPACE, " ").encode())
    return torch.tensor(sizes)[tokens].sum(1).tolist()
