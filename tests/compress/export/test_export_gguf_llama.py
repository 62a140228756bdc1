"""llama.cpp itself on exported files. Skips where no interpreter with llama_cpp is known (SMELT_LLAMA_PYTHON names one)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.export.gguf import export_gguf
from smelt.compress.export.gguf_pretokenizers import KNOWN, pre_tokenizer_of
from smelt.system.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ...tiny import CONFIGS, REPOSITORY, SMELT_6M, make_model

PYTHON = os.environ.get("SMELT_LLAMA_PYTHON") or (sys.executable if find_spec("llama_cpp") else "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs llama_cpp, here or in SMELT_LLAMA_PYTHON's interpreter")

PROMPTS = ["The captain of the ship", "Once upon a time there was", "She looked at him and", "In the year 1890 the"]
AWKWARD = [
    "x = 3.14159;\n\n    return\t12345678  \n",
    "  leading and trailing  ",
    "日本語 и emoji 🦙🦙 naïve",
    "it's I'LL we've 'tis",
    "a\u00a0b\u2003c\r\n\r\nd",
    "<unk> <|endoftext|> end",
    "HTTPServer camelCase ÉCOLE école ὈΔΥΣΣΕΎΣ",
]

_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
LLAMA3 = _ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = _ROPE | {
    "rope_type": "longrope",
    "factor": 2.0,
    "short_factor": [1 + 0.01 * i for i in range(16)],
    "long_factor": [1 + 0.3 * i for i in range(16)],
}


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=() if a == "llama" else pytest.mark.slow) for a in CONFIGS if a != "opt"],
)
def test_llama_cpp_computes_what_transformers_computes(
    architecture: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    changes = {"norm_topk_prob": True} if architecture == "qwen3_moe" else {}
    path = tiny(architecture, **changes)
    # llama.cpp has sliding windows in Gemma only; the others agree as far as the window reaches.
    length = 14 if architecture == "mistral" else 48
    # llama.cpp looks GELU up in a table of float16.
    tolerance = 2e-3 if "ge" in architecture or "gpt" in architecture else 2e-5
    _agrees(path, length, tolerance, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": LINEAR}),
        ("qwen2", {"rope_parameters": YARN}),
        ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.4}}),
        ("phi3", {"rope_parameters": LONGROPE}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
def test_what_a_config_asks_for_reaches_llama_cpp(
    architecture: str, changes: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    _agrees(tiny(architecture, **changes), 100, 2e-5 if "rope_parameters" in changes else 2e-3, tmp_path)


@pytest.mark.parametrize("group", [32, 64])
def test_four_bit_codes_generate_what_the_checkpoint_does(
    group: int, recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    made = run(recipe(SMELT_6M, {"evaluate": False}, group_size=group, rounding="nearest"), progress=False)
    path = Path(made.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    expected = [_greedy(model, prompt, 40) for prompt in prompts]
    asked = [[prompt, 40] for prompt in prompts]
    assert _ask(model=str(_export(path, tmp_path, "f32")), generate=asked)["generate"] == expected
    file = _export(path, tmp_path, None)
    found = _ask(model=str(file), generate=asked)["generate"]
    # llama.cpp rounds the inputs of 4-bit weights to 8 bits, so it may choose another token where two are nearly as likely.
    for prompt, ours, theirs in zip(prompts, expected, found, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is None:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ours[:at]])).logits[0, -1]
        assert logits[ours[at]] - logits[theirs[at]] < 0.25
    text = (REPOSITORY / "models" / "builtin" / "corpus" / "evaluation.jsonl").read_text(encoding="utf-8")
    tokens = torch.tensor([tokenizer.encode(json.loads(text.splitlines()[0])["text"])[:128]])
    with torch.no_grad():
        exact = model(tokens).logits.numpy()
    error = _logits(file, tokens.tolist(), tmp_path) - exact
    assert np.linalg.norm(error) <= 1.5e-2 * np.linalg.norm(exact)


def test_stories_are_as_their_author_has_them(shared: Path, tmp_path: Path) -> None:
    path = shared / "models" / "stories260K"
    found = _ask(model=str(_export(path, tmp_path, "f32")), generate=[[[1], 200]])["generate"][0]
    story = AutoTokenizer.from_pretrained(path).decode([1, *found], skip_special_tokens=True)
    assert story.strip() == (path / "expected_greedy_200.txt").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("name", ["smelt-6m", "stories260K", "gpt2", "smollm2"])
def test_llama_cpp_cuts_real_text_alike(name: str, shared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if name == "gpt2":
        folder.mkdir()
        shutil.copy(shared / "tokenizers" / "gpt2" / "encoder.json", folder / "vocab.json")
        shutil.copy(shared / "tokenizers" / "gpt2" / "vocab.bpe", folder / "merges.txt")
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    else:
        shutil.copytree(shared / ("tokenizers" if name == "smollm2" else "models") / name, folder)
    lines = [
        line
        for file in ("wikitext2_test_unk.txt", "tinyshakespeare.txt")
        for line in (shared / "data" / "text" / file).read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    _compare(folder, [*lines[:: len(lines) // 200], *AWKWARD])


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_every_named_way_of_cutting_is_llama_cpps(known: Any, tmp_path: Path) -> None:
    """Tokenizers of all the known kinds, trained here."""
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in known.cuts]
    trained = Tokenizer(models.BPE(ignore_merges=known.whole_words))
    trained.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    corpus = (REPOSITORY / "models" / "builtin" / "corpus" / "evaluation.jsonl").read_text(encoding="utf-8")
    texts = [json.loads(line)["text"] for line in corpus.splitlines()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([*texts[:100], *AWKWARD * 5], trainer)
    assert pre_tokenizer_of(json.loads(trained.to_str())) == known
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>").save_pretrained(tmp_path / "model")
    notes = [known.differs] if known.differs else []
    awkward = [line for line in AWKWARD if not (known.differs and "É" in line)]
    _compare(tmp_path / "model", [*(text[:300] for text in texts[100:160]), *awkward], notes)


def _agrees(path: Path, length: int, tolerance: float, folder: Path) -> None:
    """Logits of random tokens are transformers'."""
    tokens = torch.randint(6, 4000, (2, length), generator=torch.Generator().manual_seed(1))
    found = _logits(_export(path, folder, "f32"), tokens.tolist(), folder)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def _compare(folder: Path, lines: list[str], notes: list[str] | None = None) -> None:
    """Both cut lines into the same tokens; the model around the tokenizer does not matter."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = max(tokenizer.get_vocab().values()) + 1
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    make_model("llama", vocab_size=size, **small).save_pretrained(folder)
    file = folder / "model.gguf"
    record = export_gguf(folder, file, kind="f16", progress=Progress(False))
    assert record.notes == (notes or [])
    found = _ask(model=str(file), tokenize=lines, special=True)["tokenize"]
    for line, theirs in zip(lines, found, strict=True):
        assert theirs == tokenizer.encode(line), line


def _greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """The most likely tokens; generate() ends at an end token, or leaves it out."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + count:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _export(path: Path, folder: Path, kind: str | None) -> Path:
    file = folder / f"{kind}.gguf"
    export_gguf(path, file, kind=kind, progress=Progress(False))
    return file


def _logits(file: Path, tokens: list[list[int]], folder: Path) -> np.ndarray:
    _ask(model=str(file), logits=tokens, save=str(folder / "logits.npy"), length=128)
    return np.load(folder / "logits.npy")


def _ask(**request: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("export_gguf_llama.py")
    done = subprocess.run([PYTHON, script], input=json.dumps(request), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
