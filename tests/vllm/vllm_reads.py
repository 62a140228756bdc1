"""Run by the Python that has vLLM: load checkpoints one after another, and say what each computes or why it is refused.

    python vllm_reads.py REQUEST.json

The request names prompts (token ids), how many tokens to generate, the result's file and the checkpoints' directories. The
result holds, for each checkpoint, greedy tokens and the log probabilities of the prompts' own tokens, or one sentence. It is
written after each, so that the one that ends the process is known, too. `heads` may name draft heads of EAGLE-3, by checkpoint:
then greedy tokens come with how many of them there were after each step, in the type `dtype`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# In this process, so that what an engine raises arrives here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def read(path: str, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """What one checkpoint computes, in the type that it names, by the kernels that vLLM chooses."""
    llm = LLM(path, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=len(prompts))
    wanted = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    found = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "prompts": [
            [chances[token].logprob for token, chances in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
            for ids, answer in zip(prompts, answers, strict=True)
        ],
    }
    llm.llm_engine.engine_core.shutdown()
    return found


def read_with_head(path: str, head: str, dtype: str, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """What one checkpoint computes with drafts of three tokens: how many tokens are there after each step tells which were accepted."""
    llm = LLM(
        path,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=len(prompts),
        speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": 3},
    )
    wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": ids}, wanted)
    found: dict[str, Any] = {"tokens": [[] for _ in prompts], "steps": [[] for _ in prompts]}
    while engine.has_unfinished_requests():
        for answer in engine.step():
            tokens = list(answer.outputs[0].token_ids)
            found["tokens"][int(answer.request_id)] = tokens
            found["steps"][int(answer.request_id)].append(len(tokens))
    engine.engine_core.shutdown()
    return found


def why(error: BaseException) -> str:
    """The first cause, as one line; where it was raised, where it says nothing."""
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split()) or f"in {where.name}: {where.line}"
    return f"{type(error).__name__}: {said}"[:600]


def main(request: dict[str, Any]) -> None:
    """Answer one request."""
    result = Path(request["result"])
    heads = request.get("heads", {})
    found: dict[str, Any] = {}
    for name, path in request["checkpoints"].items():
        found[name] = {"refused": "vLLM ended the process"}
        result.write_text(json.dumps(found))
        try:
            found[name] = (
                read_with_head(path, heads[name], request["dtype"], request["prompts"], request["count"])
                if name in heads
                else read(path, request["prompts"], request["count"])
            )
        except Exception as error:
            found[name] = {"refused": why(error)}
        cleanup_dist_env_and_memory()
        gc.collect()
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
