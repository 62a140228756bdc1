"""What llama.cpp makes of a GGUF file; run by an interpreter that has llama_cpp, which may be another than the tests'.

Standard input is a request as JSON, standard output the answer as JSON. Nothing but llama_cpp and numpy is imported.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np


def main(request: dict) -> dict:
    """Answer ``tokenize`` (texts), ``generate`` ([prompt, count]), ``logits`` (tokens, saved beside) and ``quantize``."""
    answer: dict = {}
    if "quantize" in request:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = request["quantize"]["ftype"]
        parameters.pure = True
        source, target = request["model"].encode(), request["quantize"]["to"].encode()
        llama_cpp.llama_model_quantize(source, target, parameters)
        return answer
    model = llama_cpp.Llama(
        request["model"],
        n_ctx=request.get("length", 512),
        n_threads=1,
        logits_all=True,
        verbose=False,
        type_k=0,
        type_v=0,
    )
    answer["tokenize"] = [
        model.tokenize(text.encode(), add_bos=request.get("special", False), special=True)
        for text in request.get("tokenize", [])
    ]
    answer["generate"] = [greedy(model, tokens, count) for tokens, count in request.get("generate", [])]
    if "logits" in request:
        rows = []
        for tokens in request["logits"]:
            model.reset()
            model.eval(tokens)
            rows.append(np.array(model.scores[: len(tokens)], dtype=np.float32))
        np.save(request["save"], np.stack(rows))
    return answer


def greedy(model: llama_cpp.Llama, tokens: list[int], count: int) -> list[int]:
    """The most likely tokens after a prompt, one after another."""
    model.reset()
    model.eval(tokens)
    found: list[int] = []
    while len(found) < count:
        best = int(np.argmax(model.scores[model.n_tokens - 1]))
        found.append(best)
        model.eval([best])
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
