"""What a training text teaches: where documents end, and of conversations and prompts only the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.distill.run.examples import example_pieces
from smelt.distill.run.training_text import training_windows
from smelt.distill.settings import TrainingText
from smelt.system.errors import SmeltError
from smelt.system.progress import Progress
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...tiny import SMELT_6M

ASKED = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small model."}]
MORE = [{"role": "user", "content": "Really?"}, {"role": "assistant", "content": "Yes."}]


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(SMELT_6M)
    found.chat_template = TEMPLATE
    return found


def pieces(path: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[tuple[str, bool]]:
    """The text with whether it is learned, neighbours of a kind in one."""
    found: list[tuple[str, bool]] = []
    for piece in example_pieces(TrainingText(source=str(path), **settings).text(), tokenizer):
        text = tokenizer.decode(piece.ids)
        if found and found[-1][1] == piece.learned:
            found[-1] = found[-1][0] + text, piece.learned
        elif text:
            found.append((text, piece.learned))
    return found


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_documents_end_with_the_end_token(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = written(tmp_path / "text.jsonl", {"text": "One."}, {"text": "  "}, {"text": "Two."})
    end = tokenizer.eos_token
    assert pieces(path, tokenizer) == [(f"One.{end}Two.{end}", True)]
    # A text file is one document, whose paragraphs are no ends.
    (tmp_path / "text.txt").write_text("One.\n\nTwo.")
    assert pieces(tmp_path / "text.txt", tokenizer) == [("One.\n\nTwo.", True)]
    (tmp_path / "text.txt").rename(tmp_path / "text")
    assert pieces(tmp_path / "text", tokenizer) == [("One.\n\nTwo.", True)]


def test_prompts_are_read_and_completions_learned(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = written(tmp_path / "pairs.jsonl", {"q": "2 + 2 = ", "a": "4"}, {"q": "3 + 3 = ", "a": "6"})
    end = tokenizer.eos_token
    # Of a space before it, the answer's first token may be part.
    expected = [("2 + 2 =", False), (f" 4{end}", True), ("3 + 3 =", False), (f" 6{end}", True)]
    assert pieces(path, tokenizer, field="q", completion="a") == expected


def test_of_conversations_the_assistants_messages_are_learned(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = written(tmp_path / "chat.jsonl", {"messages": ASKED + MORE})
    found = pieces(path, tokenizer, field="messages")
    whole = tokenizer.apply_chat_template(ASKED + MORE, tokenize=False)
    assert "".join(text for text, _ in found) == whole
    learned = [text for text, is_learned in found if is_learned]
    assert learned == ["A small model.<|end|>", "Yes.<|end|>"]  # also that it ends there


def test_templates_that_leave_out_earlier_thoughts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """As Qwen3's does: an answer that it writes otherwise later is an example of its own."""
    thinking = AutoTokenizer.from_pretrained(SMELT_6M)
    thinking.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    )
    path = written(tmp_path / "chat.jsonl", {"messages": ASKED + MORE})
    found = pieces(path, thinking, field="messages")
    assert [text for text, is_learned in found if is_learned] == [
        "<think></think>A small model.<|end|>",
        "<think></think>Yes.<|end|>",
    ]
    whole = thinking.apply_chat_template(ASKED + MORE, tokenize=False)
    assert "".join(text for text, _ in found) == thinking.apply_chat_template(ASKED, tokenize=False) + whole


def test_conversations_of_which_nothing_is_learned_are_passed_over(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    greeting = [{"role": "assistant", "content": "Hello."}]
    path = written(
        tmp_path / "chat.jsonl",
        {"messages": []},
        {"messages": ASKED[:1]},
        {"messages": greeting},
        {"messages": greeting + ASKED},
    )
    learned = [text for text, is_learned in pieces(path, tokenizer, field="messages") if is_learned]
    assert learned == ["A small model.<|end|>"]


def test_answers_are_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    """Tokenizers like Llama 2's put a space before whatever they are given."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b", ":"])}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    path = written(tmp_path / "pairs.jsonl", {"q": "a:", "c": "b"}, {"q": "a:", "c": " b"})
    source = TrainingText(source=str(path), field="q", completion="c").text()
    learned = [piece.ids for piece in example_pieces(source, tokenizer) if piece.learned]
    assert learned == [[vocabulary["b"], 2], [vocabulary["▁b"], 2]]


def test_windows_without_anything_to_learn_are_left_out(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    records = [{"q": "What follows? " * 40, "a": "An answer."} for _ in range(60)]
    source = TrainingText(source=str(written(tmp_path / "pairs.jsonl", *records)), field="q", completion="a").text()
    windows = training_windows(source, tokenizer, 16, 30, tmp_path / "text.bin", Progress(False))
    batch = windows.batch(torch.arange(windows.count))
    assert batch.counted is not None
    assert windows.count >= 30
    assert (batch.counted.sum(1) > 0).all()


@pytest.mark.parametrize(
    ("record", "settings", "said"),
    [
        ({"messages": [{"role": "user", "content": "Hm?"}]}, {"field": "messages"}, "no text that can be learned"),
        ({"text": None}, {}, "holds NoneType, not text"),
        ({"q": "a", "a": None}, {"field": "q", "completion": "a"}, "holds NoneType, not text"),
        ({"messages": ["Hm?"]}, {"field": "messages"}, "not of messages with roles"),
        ({"messages": 5}, {"field": "messages"}, "holds int, not text"),
        ({"q": "a", "a": ["b"]}, {"field": "q", "completion": "a"}, "holds list, not text"),
        ({"q": "a"}, {"field": "q", "completion": "a"}, "no field 'a'"),
        ({"text": " "}, {}, "holds no text"),
    ],
)
def test_what_teaches_nothing_is_refused(
    record: dict[str, Any], settings: dict[str, Any], said: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(SmeltError, match=said):
        pieces(written(tmp_path / "bad.jsonl", record), tokenizer, **settings)


def test_text_without_prompts_and_models_without_templates(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("One.")
    with pytest.raises(SmeltError, match="no prompts and completions"):
        pieces(tmp_path / "text.txt", tokenizer, completion="a")
    plain = AutoTokenizer.from_pretrained(SMELT_6M)
    plain.chat_template = None
    with pytest.raises(SmeltError, match="no chat template"):
        pieces(written(tmp_path / "chat.jsonl", {"messages": ASKED}), plain, field="messages")


def test_windows_know_which_predictions_count(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    records = [{"q": f"{i} and one is", "a": f" {i + 1}"} for i in range(200)]
    source = TrainingText(source=str(written(tmp_path / "pairs.jsonl", *records)), field="q", completion="a").text()
    windows = training_windows(source, tokenizer, 16, 30, tmp_path / "text.bin", Progress(False))
    batch = windows.batch(torch.arange(windows.count))
    assert batch.counted is not None
    expected = [(id_, piece.learned) for piece in example_pieces(source, tokenizer) for id_ in piece.ids]
    assert all(any(is_learned for _, is_learned in expected[i + 1 : i + 16]) for i in range(0, 16 * windows.count, 16))
    ids = [id_ for id_, _ in expected][: batch.tokens.numel()]
    assert batch.tokens.flatten().tolist() == ids
    learned = torch.tensor([is_learned for _, is_learned in expected][: len(ids)]).view_as(batch.tokens)
    assert torch.equal(batch.counted[:, :-1], learned[:, 1:].float())
    assert not batch.counted[:, -1].any()
    assert batch.weight == float(learned[:, 1:].sum())
    # Text of which all is learned needs no such file.
    plain = training_windows(TrainingText().text(), tokenizer, 16, 30, tmp_path / "plain.bin", Progress(False))
    assert plain.batch(torch.arange(2)).counted is None
