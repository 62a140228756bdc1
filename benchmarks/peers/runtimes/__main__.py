"""Measure one other inference runtime on a CPU, to set beside our own.

    PEER/bin/python -m benchmarks.peers.runtimes llama.cpp --model DIR --scratch DIR

Run from the repository, by a Python that has the runtime; Smelt need not be installed there. Each peer converts a Hugging Face
Llama checkpoint once into a scratch folder, then is timed on prompts of random token ids, so no tokenizer takes part. The result is
one line of JSON:

* ``prefill_N``: N prompt tokens divided by the seconds to the first token, from an empty cache;
* ``decode_N``: tokens per second, after the first token, of greedy decoding behind an N-token prompt;
* ``concurrent_32``: output tokens per second, prompts included in the time, of 32 requests
  started at once, each with 128 tokens in and 32 tokens out.

Every figure is the median of several runs after one warm-up run, and every run has new prompts. With ``--in-turns`` the
runs are asked for one by one on standard input (see turns.py), so that they can stand between another runtime's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..turns import answer
from .ctranslate2 import CTranslate2
from .llama_cpp import LlamaCpp
from .openvino import OpenVino, OpenVinoInt8
from .peer import (
    DECODE_LENGTHS,
    OUTPUT_TOKENS,
    PREFILL_LENGTHS,
    REQUEST_PROMPT,
    REQUESTS,
    SEED,
    Peer,
    PeerError,
    PeerSettings,
    Tokens,
)
from .transformers import TorchAo, Transformers
from .vllm import Vllm

FIRST_ORDINARY_TOKEN = 16
CONCURRENT_REPEATS = 3
PEERS: dict[str, type[Peer]] = {
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "openvino-int8": OpenVinoInt8,
    "torchao": TorchAo,
    "ctranslate2": CTranslate2,
    "transformers": Transformers,
    "vllm": Vllm,
}


class Prompts:
    """A seeded source of prompts that never repeat."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(SEED)

    def draw(self, length: int) -> Tokens:
        """A new prompt without the special tokens at the start of the vocabulary."""
        drawn: Tokens = self._random.integers(FIRST_ORDINARY_TOKEN, self._vocabulary, length).tolist()
        return drawn


def median_seconds(run: Callable[[], float], repeats: int) -> float:
    """The median of ``repeats`` runs after one warm-up."""
    run()
    return statistics.median(run() for _ in range(repeats))


def measure(peer: Peer, prompts: Prompts, repeats: int) -> dict[str, float | None]:
    """The peer's figures; those it does not have are None."""
    figures: dict[str, float | None] = {f"prefill_{length}": None for length in PREFILL_LENGTHS}
    figures |= {f"decode_{length}": None for length in DECODE_LENGTHS}
    figures["concurrent_32"] = None
    for length in peer.prefill_lengths:
        seconds = median_seconds(lambda length=length: peer.prefill(prompts.draw(length)), repeats)
        figures[f"prefill_{length}"] = length / seconds
    for length in peer.decode_lengths:
        seconds = median_seconds(lambda length=length: peer.decode(prompts.draw(length), OUTPUT_TOKENS), repeats)
        figures[f"decode_{length}"] = (OUTPUT_TOKENS - 1) / seconds
    for field, run in peer.concurrent_runs().items():
        seconds = median_seconds(
            lambda run=run: run([prompts.draw(REQUEST_PROMPT) for _ in range(REQUESTS)], OUTPUT_TOKENS),
            CONCURRENT_REPEATS,
        )
        figures[field] = REQUESTS * OUTPUT_TOKENS / seconds
    return {field: None if value is None else round(value, 2) for field, value in figures.items()}


def runs_of(peer: Peer, prompts: Prompts) -> dict[str, Callable[[int], float]]:
    """The peer's runs, by what turns.py calls them."""
    return {
        "prefill": lambda length: peer.prefill(prompts.draw(length)),
        "decode": lambda length: peer.decode(prompts.draw(length), OUTPUT_TOKENS),
        "concurrent": lambda count: peer.concurrent(
            [prompts.draw(REQUEST_PROMPT) for _ in range(count)], OUTPUT_TOKENS
        ),
    }


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--model", type=Path, required=True, help="a Llama checkpoint in Hugging Face format")
    parser.add_argument("--scratch", type=Path, required=True, help="where converted models are kept")
    parser.add_argument("--repeats", type=int, default=5, help="runs behind each prefill and decode median")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exporter", default="optimum-cli", help="the optimum-cli of the OpenVINO export")
    parser.add_argument("--in-turns", action="store_true", help="measure one run for each line of standard input")
    parser.add_argument("--convert-only", action="store_true", help="convert the model and measure nothing")
    return parser.parse_args()


def main() -> None:
    """Convert, measure and print the result."""
    arguments = parsed_arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # In a checkout that is installed for another Python, torch finds Smelt's entry point, and no Smelt behind it.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    settings = PeerSettings(arguments.model.resolve(), arguments.scratch, arguments.threads, arguments.exporter)
    try:
        peer = PEERS[arguments.peer](settings)
        peer.convert()
        if arguments.convert_only:
            return
        peer.load()
        if arguments.in_turns:
            answer(runs_of(peer, Prompts(settings.config()["vocab_size"])))
            return
        figures = measure(peer, Prompts(settings.config()["vocab_size"]), arguments.repeats)
    except PeerError as error:
        sys.exit(str(error))
    record = {"peer": arguments.peer, "version": peer.version, "format": peer.format, **figures, "notes": peer.notes}
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
