"""What the quantization jobs of other tools share: arguments, measured stages, the dense checkpoint, one line of JSON.

Imported by ``quantize_llm_compressor.py``, ``quantize_gptqmodel.py`` and ``quantize_autoround.py``, which run as scripts in
environments of their own, so it imports nothing of Smelt, and nothing heavy before the stages are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass
class PeerJob:
    """What a peer is asked for, and what the stages of the work took.

    Attributes:
        model: a Hugging Face model directory.
        tokens: a safetensors file with the calibration windows ``tokens`` ``[samples, length]``.
        method: a name of the peer's script.
        batch_size: windows that go through the model together.
        out: where the dense checkpoint goes; none to leave it out.
        options: further settings of the peer's own method, by their own names.
        arguments: all of the command line's, those of one peer too.
        measured: seconds and peak resident memory by stage.
    """

    model: Path
    tokens: Path
    method: str
    bits: int
    group_size: int
    batch_size: int
    out: Path | None
    options: dict[str, Any]
    arguments: argparse.Namespace
    measured: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the wall time of a stage, and the peak memory of the process when it ends."""
        start = time.perf_counter()
        yield
        self.measured[f"{name}_seconds"] = round(time.perf_counter() - start, 2)
        self.measured[f"{name}_peak_bytes"] = peak()

    def windows(self) -> Tensor:
        """The calibration windows ``[samples, length]``."""
        return read_tokens(self.tokens)

    def write_dense(self, weights: dict[str, Tensor], *, tied: bool) -> None:
        """Write a float32 checkpoint that any tool reads, if it is asked for.

        Args:
            weights: all of the model's, by its own names; others are left out.
            tied: whether the output layer still shares the embeddings (a rotation parts them).
        """
        if self.out is None:
            return
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(self.model)
        config.tie_word_embeddings = tied
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict({name: weights[name].float() for name in plain.state_dict()})
        plain.save_pretrained(self.out)
        transformers.AutoTokenizer.from_pretrained(self.model).save_pretrained(self.out)


def peak() -> int:
    """Largest resident memory of this process so far, in bytes (getrusage would count the parent's too)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def read_tokens(path: Path) -> Tensor:
    """Token ids ``[windows, length]`` of a safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)["tokens"].long()


def perplexity(model: Any, tokens: Tensor) -> float:
    """Of a transformers model over windows of equal length, each read alone, in the model's own dtype."""
    import torch

    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(window[None], use_cache=False).logits[0, :-1].float(), window[1:])
            for window in tokens
        ]
    return math.exp(sum(loss.item() for loss in losses) / len(losses))


def run_job(
    work: Callable[[PeerJob], dict[str, Any]],
    methods: str,
    packages: tuple[str, ...],
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Read the arguments, do the work with its prints sent to standard error, and print the line of JSON.

    Args:
        work: imports, loads, quantizes and writes, each in a ``stage``; returns what else is worth stating.
        methods: what ``--method`` can be, for ``--help``.
        packages: whose versions are stated.
        add_arguments: adds what only this peer takes.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--tokens", type=Path, required=True, help="safetensors file with the windows 'tokens'")
    parser.add_argument("--method", required=True, help=methods)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True, help="weights that share a scale; -1: a whole row")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, help="directory of the dense float32 checkpoint")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="a setting of the peer's method"
    )
    if add_arguments:
        add_arguments(parser)
    given = parser.parse_args()
    options = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in given.set)}
    job = PeerJob(
        model=given.model,
        tokens=given.tokens,
        method=given.method,
        bits=given.bits,
        group_size=given.group_size,
        batch_size=given.batch_size,
        out=given.out,
        options=options,
        arguments=given,
    )
    with contextlib.redirect_stdout(sys.stderr):
        extra = work(job)
    result = {"method": job.method, "bits": job.bits, "group_size": job.group_size, "batch_size": job.batch_size}
    result |= extra | job.measured
    result["versions"] = {name: version(name) for name in (*packages, "torch", "transformers")}
    print(json.dumps(result))
