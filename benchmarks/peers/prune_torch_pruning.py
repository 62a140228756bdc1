"""One job by Torch-Pruning; run by the peer's own interpreter.

    PEER/bin/python benchmarks/peers/prune_torch_pruning.py --model DIR --tokens FILE --importance magnitude --what ffn --ratio 0.25 --out DIR

``--what``: ``ffn`` (feed-forward channels), ``hidden`` (channels of the residual stream), or ``both``. ``--importance``: ``magnitude``
(its GroupMagnitudeImportance, as in its own example for language models) or ``taylor`` (GroupTaylorImportance, after gradients of
the loss on the windows). Heads are left alone: whole groups of heads are not among what its pruner takes from Llama.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
import torch_pruning
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--tokens", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--importance", choices=("magnitude", "taylor"), required=True)
    parser.add_argument("--what", choices=("ffn", "hidden", "both"), required=True)
    parser.add_argument("--ratio", type=float, required=True)
    a = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    # A shared weight would be pruned once for both its users, as it should; apart, both follow the graph.
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    tokens = load_file(a.tokens)["tokens"]
    importance = (
        torch_pruning.importance.GroupMagnitudeImportance(p=2, group_reduction="mean")
        if a.importance == "magnitude"
        else torch_pruning.importance.GroupTaylorImportance(group_reduction="mean")
    )
    layers = model.model.layers
    narrow = [layer.mlp.gate_proj for layer in layers] + [layer.mlp.up_proj for layer in layers]
    stream = [layer.self_attn.o_proj for layer in layers] + [layer.mlp.down_proj for layer in layers]
    heads = [p for layer in layers for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)]
    ratios = dict.fromkeys([*(narrow if a.what != "hidden" else []), *(stream if a.what != "ffn" else [])], a.ratio)
    if a.what != "ffn":
        ratios[model.model.embed_tokens] = a.ratio
    config = model.config
    pruner = torch_pruning.pruner.BasePruner(
        model,
        example_inputs=tokens[:1, :16],
        importance=importance,
        pruning_ratio=0.0,
        pruning_ratio_dict=ratios,
        ignored_layers=[model.lm_head, *heads],
        num_heads=dict.fromkeys(heads[::3], config.num_attention_heads)
        | dict.fromkeys([*heads[1::3], *heads[2::3]], config.num_key_value_heads),
        prune_num_heads=False,
        prune_head_dims=False,
        root_module_types=[torch.nn.Linear, torch.nn.Embedding],
        output_transform=lambda out: out.logits.sum(),
    )
    if a.importance == "taylor":
        for start in range(0, len(tokens), 8):
            windows = tokens[start : start + 8]
            model(windows, labels=windows, use_cache=False).loss.backward()
    pruner.step()
    config.intermediate_size = layers[0].mlp.gate_proj.out_features
    config.hidden_size = model.lm_head.in_features
    for parameter in model.parameters():
        parameter.grad = None
    model.bfloat16().save_pretrained(a.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(a.model / name, a.out / name)
    print(
        json.dumps(
            {
                "version": torch_pruning.__version__,
                "intermediate": config.intermediate_size,
                "hidden": config.hidden_size,
            }
        )
    )


if __name__ == "__main__":
    main()
