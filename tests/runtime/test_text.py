"""Text as it grows, and stop strings wherever tokens cut them."""

from __future__ import annotations

import random

import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.engine.text_stream import TextStream
from transformers import AutoTokenizer

from ..tiny import SMELT_6M
from .drive import engine

TOKENIZER = AutoTokenizer.from_pretrained(SMELT_6M)
TEXTS = [
    "The city — naïve café, 東京 and 🙂🙃 smiles.",
    "one\n\n  two\tthree",
    "".join(chr(c) for c in range(32, 900, 7)),
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_whole(text: str) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    for split in range(0, len(tokens), 3):
        stream = TextStream(TOKENIZER, tokens[:split], ())
        seen = ""
        for token in tokens[split:]:
            stream.add(token)
            assert stream.text.startswith(seen)
            seen = stream.text
        stream.end()
        assert TOKENIZER.decode(tokens[:split]) + stream.text == TOKENIZER.decode(
            tokens
        ) or "\N{REPLACEMENT CHARACTER}" in (TOKENIZER.decode(tokens[:split]))


def test_stop_strings_are_found_wherever_they_fall() -> None:
    chance = random.Random(0)
    text = "Once there was a fox who lived in a wood, and the fox was old. ### The end ### of it."
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    for _ in range(300):
        stops = []
        for _ in range(chance.choice([1, 2])):
            start = chance.randrange(1, len(text) - 1)
            stops.append(text[start : start + chance.randrange(1, 15)])
        stream = TextStream(TOKENIZER, [], tuple(stops))
        given = []
        for token in tokens:
            stream.add(token)
            given.append(stream.text)
            if stream.stopped_by:
                break
        grown = [TOKENIZER.decode(tokens[: i + 1]) for i in range(len(tokens))]
        met = next(min(t.find(stop) for stop in stops if stop in t) for t in grown if any(stop in t for stop in stops))
        assert stream.text == text[:met]
        assert stream.stopped_by in stops
        # Nothing was given out that had to be taken back.
        assert all(stream.text.startswith(piece) for piece in given)


def test_a_beginning_of_a_stop_string_is_held_back_and_then_given() -> None:
    tokens = TOKENIZER("a <br and more", add_special_tokens=False).input_ids
    stream = TextStream(TOKENIZER, [], ("<break>",))
    given = []
    for token in tokens:
        stream.add(token)
        given.append(stream.text)
    stream.end()
    assert stream.text == "a <br and more"
    assert not any(piece.endswith(("<", "<b", "<br")) for piece in given)
    cut = TextStream(TOKENIZER, [], ("<break>",))
    for token in TOKENIZER("a <br", add_special_tokens=False).input_ids:
        cut.add(token)
    cut.end()
    assert cut.text == "a <br"


def test_an_engine_stops_at_strings_and_not_before_min_tokens() -> None:
    running = engine(SMELT_6M)
    whole = running.generate("The city of", SamplingParams(temperature=0, max_tokens=30))[0].completions[0]
    assert whole.text is not None
    stop = whole.text[20:24]
    stopped = running.generate("The city of", SamplingParams(temperature=0, max_tokens=30, stop=stop))[0].completions[0]
    assert stopped.text == whole.text[: whole.text.find(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.stopped_by == stop
    late = SamplingParams(temperature=0, max_tokens=30, stop=stop, min_tokens=29)
    assert len(running.generate("The city of", late)[0].completions[0].tokens) >= 29
