"""Text as it grows, and stop strings wherever tokens cut them."""

from __future__ import annotations

import functools
import gc
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from smelt.runtime import SamplingParams
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.requests.text_stream import TextStream
from smelt.runtime.requests.token_counts import TokenCounts
from tokenizers import Tokenizer, decoders, models
from tokenizers import trainers as training
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...tiny import SHARED, SMELT_6M
from ..drive import engine

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


def _like_sentencepiece() -> PreTrainedTokenizerBase:
    """Bytes for unknown characters, and the first word's space left out, as Llama 2 has it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁ti", "me", "é", "."]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _of_word_pieces() -> PreTrainedTokenizerBase:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()  # type: ignore[assignment]
    made.train_from_iterator([*TEXTS, "don't . stop , here"], training.WordPieceTrainer(special_tokens=["[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", clean_up_tokenization_spaces=True)


def _shared(name: str) -> PreTrainedTokenizerBase:
    if not (SHARED / name).is_dir():
        pytest.skip(f"needs {SHARED / name}, which is not part of the project")
    return AutoTokenizer.from_pretrained(SHARED / name)


TOKENIZERS = {
    "bytes": lambda: TOKENIZER,
    "sentencepiece": _like_sentencepiece,
    "word pieces": _of_word_pieces,
    "slow": ByT5Tokenizer,
    "smollm2": lambda: _shared("tokenizers/smollm2"),
    "stories260K": lambda: _shared("models/stories260K"),
}
_REPLACES_RUNS = ("sentencepiece", "stories260K")
_CHARACTERS = st.one_of(st.text(max_size=30), st.text("the time é東🙂 .,'\n", max_size=30))


@functools.cache
def _tokenizer(kind: str) -> PreTrainedTokenizerBase:
    return TOKENIZERS[kind]()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(_CHARACTERS, max_size=4), split=st.floats(0, 1), data=st.data())
def test_streamed_text_is_that_of_the_whole(kind: str, texts: list[str], split: float, data: st.DataObject) -> None:
    """Texts with special tokens between them, cut anywhere into a prompt and what follows it."""
    tokenizer = _tokenizer(kind)
    special = [token for token in tokenizer.all_special_ids if token is not None]
    tokens = []
    for text in texts:
        tokens += tokenizer(text, add_special_tokens=False).input_ids
        tokens += data.draw(st.lists(st.sampled_from(special), max_size=2)) if special else []
    prompt = tokens[: round(split * len(tokens))]
    # Of a run of bytes that is no text, sentencepiece replaces all: the prompt's characters would change as it goes on.
    assume(kind not in _REPLACES_RUNS or "\N{REPLACEMENT CHARACTER}" not in _decoded(tokenizer, prompt))
    _check_stream(tokenizer, prompt, tokens[len(prompt) :])


@pytest.mark.parametrize("kind", ["bytes", "word pieces", "slow", "smollm2"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_streamed_garbage_is_that_of_the_whole(kind: str, data: st.DataObject) -> None:
    """Any ids, so also halves of characters, as a broken model writes them."""
    tokenizer = _tokenizer(kind)
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=20)
    _check_stream(tokenizer, data.draw(ids), data.draw(ids))


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _check_stream(tokenizer: PreTrainedTokenizerBase, prompt: list[int], following: list[int]) -> None:
    stream = TextStream(tokenizer, prompt, ())
    forked = stream.fork()
    for count, token in enumerate(following):
        before = stream.text
        stream.add(token)
        assert stream.text.startswith(before)
        forked = stream.fork() if count == len(following) // 2 else forked
        if count > len(following) // 2:
            forked.add(token)
    stream.end()
    forked.end()
    assert stream.text == _decoded(tokenizer, prompt + following)[len(_decoded(tokenizer, prompt)) :]
    assert forked.text == stream.text or not following


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
            if stream.stop_reason:
                break
        grown = [TOKENIZER.decode(tokens[: i + 1]) for i in range(len(tokens))]
        met = next(min(t.find(stop) for stop in stops if stop in t) for t in grown if any(stop in t for stop in stops))
        assert stream.text == text[:met]
        assert stream.stop_reason in stops
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
    whole = running.generate("The city of", SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    assert whole.text is not None
    stop = whole.text[20:24]
    stopped = running.generate("The city of", SamplingParams(temperature=0, max_tokens=30, stop=stop))[0].outputs[0]
    assert stopped.text == whole.text[: whole.text.find(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    late = SamplingParams(temperature=0, max_tokens=30, stop=stop, min_tokens=29)
    assert len(running.generate("The city of", late)[0].outputs[0].token_ids) >= 29


def test_what_may_begin_a_stop_string_is_the_longest_end_that_does() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        stops = tuple("".join(chance.choices("ab", k=chance.randrange(1, 7))) for _ in range(3))
        stream = TextStream(TOKENIZER, [], stops)
        stream._decoded = text = "".join(chance.choices("abc", k=chance.randrange(12)))
        ends = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert stream._held() == max(ends)


def test_tokens_without_text_are_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """End tokens that a benchmark lets a model repeat."""
    stream = TextStream(TOKENIZER, [], ())
    decode, sizes = stream._decode, list[int]()
    monkeypatch.setattr(stream, "_decode", lambda tokens: sizes.append(len(tokens)) or decode(tokens))
    word = TOKENIZER("fox", add_special_tokens=False).input_ids
    for token in [*word, *[TOKENIZER.eos_token_id] * 500, *word]:
        stream.add(token)
    stream.end()
    assert stream.text == TOKENIZER.decode([*word, *word])
    assert max(sizes) < 100


@pytest.mark.parametrize("start", [0, 5])
def test_counts_of_tokens_are_those_of_counting_them(start: int) -> None:
    chance = random.Random(2)
    tokens = chance.choices(range(40), k=5)
    counts = TokenCounts(tokens, start)
    for _ in range(400):
        certain = len(tokens)
        tokens += chance.choices(range(200), k=chance.randrange(4))  # of a draft
        with counts.counted(certain) as (distinct, times):
            found = dict(zip(distinct.tolist(), times.tolist(), strict=True))
        assert found == Counter(tokens[start:])
        del tokens[certain:]
        tokens += chance.choices(range(200), k=chance.randrange(3))


def test_what_is_answered_is_freed_at_once() -> None:
    """Without the garbage collector, which comes for it thousands of requests later."""
    running = engine(SMELT_6M)
    gc.collect()
    gc.disable()
    try:
        params = SamplingParams(max_tokens=4, logprobs=3, n=2, seed=1)
        before = sum(isinstance(each, Sequence) for each in gc.get_objects())
        running.generate(["The city of", "A fox"], params)
        id = running.add_request("A river", params)
        running.step()
        running.abort(id)
        while running.has_work:
            running.step()
        assert sum(isinstance(each, Sequence) for each in gc.get_objects()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [0, 3, 29, 30, 31, 32, 40, 64, 70])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_tokens_without_text_change_nothing_behind_them(kind: str, count: int) -> None:
    """Not even inside a character, nor before a word's space."""
    tokenizer = TOKENIZER if kind == "bytes" else _like_sentencepiece()
    silent = tokenizer.eos_token_id if kind == "bytes" else tokenizer.convert_tokens_to_ids("<pad>")
    words = tokenizer("fox", add_special_tokens=False).input_ids
    after = tokenizer("\N{SLIGHTLY SMILING FACE} a fox and a fox", add_special_tokens=False).input_ids
    stream = TextStream(tokenizer, words, ())
    for token in [*[silent] * count, *after]:
        stream.add(token)
    stream.end()
    assert stream.text == _decoded(tokenizer, words + after)[len(_decoded(tokenizer, words)) :]


@pytest.mark.parametrize("broken", [1, 27, 28, 29, 30, 31, 32, 33, 61, 100])
def test_bytes_that_are_no_characters_do_not_take_those_behind_them(broken: int) -> None:
    tokenizer = ByT5Tokenizer()
    start = len(tokenizer.special_tokens_encoder) if hasattr(tokenizer, "special_tokens_encoder") else 3
    ids = [start + 0xFF] * broken + [start + byte for byte in "東京 🙂 é and more".encode()]
    stream = TextStream(tokenizer, [], ())
    for token in ids:
        stream.add(token)
    stream.end()
    assert stream.text.endswith("東京 🙂 é and more")
    assert stream.text == _decoded(tokenizer, ids)
