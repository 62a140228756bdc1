"""What a trained head would be worth as a drafter: EAGLE-3's way, for smelt-6m, beside the drafters that the engine has.

    python -m benchmarks.drafts.eagle [--tokens 1M]

One block of the model's own kind reads the outputs of a third, of two thirds and of all of the model's blocks, with the embedding of the token that was chosen, and says the
token after that; then it goes on with its own output. It learns from text that the model writes, by cross-entropy with the model's probabilities over three tokens in a row.
The engine does not have it: it is asked in plain torch what of drafts of three tokens would be accepted of text that the model writes. Its time is not
measured but counted: a draft token reads its weights and the lm_head's, of a Llama of 1.1 billion weights.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from typing import Any

import torch
from smelt.models.text.text_source import TextSource
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.measure.workload import text_prompts
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..common import REPOSITORY, save
from ..random_model import BIG

SMALL = REPOSITORY / "models" / "builtin" / "smelt-6m"
PROMPT, WRITTEN, REQUESTS, DRAFTS = 32, 96, 48, 3  # as benchmarks.drafts.distilled has them
LENGTH, BATCH, RATE, LATER = 256, 8, 2e-3, 0.8
BLOCKS = 16  # of the Llama of 1.1 billion weights


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class EagleHead(nn.Module):
    """A block that continues what a model's blocks have made of the tokens.

    Args:
        model: whose token embedding and lm_head it uses.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        size, wide = config.hidden_size, config.intermediate_size
        self.heads, self.size, self.theta = (
            config.num_attention_heads,
            config.head_dim,
            config.rope_parameters["rope_theta"],
        )
        self.table = model.get_input_embeddings().weight  # frozen, and of no importance to the optimizer
        self.fuse = nn.Linear(3 * size, size, bias=False)
        self.enter = nn.Linear(2 * size, size, bias=False)
        self.of_token, self.of_state, self.first, self.second, self.last = (_Norm(size) for _ in range(5))
        self.query_key_value = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.gate_up = nn.Linear(size, 2 * wide, bias=False)
        self.down = nn.Linear(wide, size, bias=False)
        with torch.no_grad():  # at first what the model's last block has made
            self.last.weight.copy_(model.model.norm.weight)
            self.fuse.weight.zero_()[:, 2 * size :].copy_(torch.eye(size))
            self.enter.weight.zero_()[:, size:].copy_(torch.eye(size))
            self.enter.weight[:, :size].normal_(std=0.1 / 16)
            for part in (self.out, self.down):
                part.weight.normal_(std=0.01)

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        """What the block reads of tokens and of what led to them."""
        return self.enter(torch.cat([self.of_token(self.table[tokens]), self.of_state(states)], -1))

    def projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[…, heads, tokens, size]``."""
        parts = self.query_key_value(self.first(x)).unflatten(-1, (3, self.heads, self.size)).unbind(-3)
        queries, keys, values = (part.transpose(-2, -3) for part in parts)
        return self._turned(queries, positions), self._turned(keys, positions), values

    def finished(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(self.second(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)

    def logits(self, states: Tensor) -> Tensor:
        """Of the next tokens."""
        return self.last(states) @ self.table.T

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        frequencies = self.theta ** (-torch.arange(0, self.size, 2) / self.size)
        angles = (positions[:, None] * frequencies).repeat(1, 2)
        half = self.size // 2
        return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


class ModelFeatures:
    """What three of a model's blocks make of tokens.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        blocks: Any = model.model.layers
        self._kept: dict[int, Tensor] = {}
        self._wanted = [len(blocks) // 3 - 1, 2 * len(blocks) // 3 - 1, len(blocks) - 1]
        for i in self._wanted:
            blocks[i].register_forward_hook(lambda _, __, found, i=i: self._kept.__setitem__(i, _first(found)))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """ModelFeatures ``[batch, tokens, 3 hidden]``, and the model's logits."""
        logits = self._model(tokens).logits
        return torch.cat([self._kept[i] for i in self._wanted], -1), logits


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def unrolled(head: EagleHead, tokens: Tensor, features: Tensor) -> list[Tensor]:
    """Logits of drafts of :data:`DRAFTS` tokens from every token on, of which the true ones follow; as in a draft, the first token's block
    sees the model's features, the others' their predecessor's output."""
    count = tokens.shape[1] - DRAFTS
    positions, causal = torch.arange(count), torch.ones(count, count).tril().bool()
    states = head.fuse(features)[:, :count]
    x = head.inputs(tokens[:, 1 : count + 1], states)
    queries, keys, values = head.projected(x, positions)
    own: list[tuple[Tensor, Tensor]] = []
    found = []
    for step in range(DRAFTS):
        if step:
            x = head.inputs(tokens[:, 1 + step : count + 1 + step], states)
            queries, *mine = head.projected(x, positions + step)
            own.append((mine[0], mine[1]))
        scale = head.size**-0.5
        scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~causal, -math.inf)
        more = [(queries * key).sum(-1, keepdim=True) * scale for key, _ in own]
        shares = torch.cat([scores, *more], -1).softmax(-1)
        attended = shares[..., :count] @ values
        for i, (_, value) in enumerate(own):
            attended = attended + shares[..., count + i, None] * value
        states = head.finished(x, attended)
        found.append(head.logits(states))
    return found


@torch.no_grad()
def drafted(head: EagleHead, tokens: Tensor, features: Tensor, known: int) -> list[int]:
    """A greedy draft after the first ``known`` tokens, of which the model has not seen the last one."""
    states = head.fuse(features[: known - 1])
    x = head.inputs(tokens[1:known], states)
    queries, keys, values = head.projected(x, torch.arange(known - 1))
    queries, x = queries[:, -1:], x[-1:]
    found: list[int] = []
    while True:
        attended = (queries @ keys.transpose(-1, -2) * head.size**-0.5).softmax(-1) @ values
        state = head.finished(x, attended)
        found.append(int(head.logits(state).argmax()))
        if len(found) == DRAFTS:
            return found
        x = head.inputs(torch.tensor(found[-1:]), state)
        queries, key, value = head.projected(x, torch.tensor([known - 2 + len(found)]))
        keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)


def trained(model: PreTrainedModel, features: ModelFeatures, text: Tensor, tokens: int) -> EagleHead:
    """A head that has learned from so many tokens of a text ``[windows, LENGTH]``."""
    head = EagleHead(model)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    steps, draw = tokens // (BATCH * LENGTH), torch.Generator().manual_seed(0)
    order: list[int] = []
    for step in range(steps):
        if len(order) < BATCH:
            order += torch.randperm(len(text), generator=draw).tolist()
        batch, order = text[order[:BATCH]], order[BATCH:]
        seen, logits = features(batch)
        loss = torch.zeros(())
        for ahead, said in enumerate(unrolled(head, batch, seen)):
            wanted = logits[:, 1 + ahead : 1 + ahead + said.shape[1]].softmax(-1)
            loss = loss - LATER**ahead * (wanted * said.log_softmax(-1)).sum(-1).mean()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: loss {float(loss.detach()):.3f}", flush=True)
    return head.eval()


@torch.no_grad()
def in_four_bits(head: EagleHead) -> EagleHead:
    """The same with its linears and the lm_head rounded to the nearest of four bits, in groups of 128."""
    found = copy.deepcopy(head)
    for part in found.modules():
        if isinstance(part, nn.Linear):
            part.weight.copy_(_rounded(part.weight))
    table = found.table
    found.logits = lambda states: found.last(states) @ _rounded(table).T  # type: ignore[method-assign]
    return found


def _rounded(weight: Tensor) -> Tensor:
    groups = weight.unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


@torch.no_grad()
def agreement(head: EagleHead, features: ModelFeatures, text: Tensor) -> list[dict[str, float]]:
    """By place in a draft, if the tokens before are right: how often the most likely token is the model's, and the overlap."""
    seen, logits = features(text)
    found = []
    for ahead, said in enumerate(unrolled(head, text, seen)):
        theirs = logits[:, 1 + ahead : 1 + ahead + said.shape[1]]
        late = slice(PROMPT - 1, None)
        top = (said.argmax(-1) == theirs.argmax(-1))[:, late].float().mean()
        overlap = torch.minimum(said.softmax(-1), theirs.softmax(-1)).sum(-1)[:, late].mean()
        found.append({"top": float(top), "overlap": float(overlap)})
    return found


def accepted(head: EagleHead, features: ModelFeatures, text: Tensor) -> list[float]:
    """The share of drafts whose first, second, … tokens are all what the model wrote."""
    right, drafts = [0] * DRAFTS, 0
    for tokens in text:
        seen = features(tokens[None])[0][0]
        known = PROMPT + 1
        while known + DRAFTS < len(tokens):
            draft = drafted(head, tokens, seen, known)
            count = next((i for i, token in enumerate(draft) if token != tokens[known + i]), DRAFTS)
            right = [each + (i < count) for i, each in enumerate(right)]
            drafts, known = drafts + 1, known + count + 1
    return [each / drafts for each in right]


def cost(bits: float) -> float:
    """The weights that a draft token reads, beside those of a step of the model in bfloat16, of a Llama of 1.1 billion weights."""
    hidden, block = BIG.hidden, BIG.block_bytes / 2
    table = BIG.vocabulary * hidden
    return (5 * hidden * hidden + block + table) * bits / (16 * (BLOCKS * block + table))


def expected_speed(shares: list[float], each: float) -> tuple[float, int]:
    """The best speedup of any number of draft tokens if a verification takes no longer than a step of one token, and that number."""
    sums = itertools.accumulate(shares)
    return max(((1 + total) / (1 + count * each), count) for count, total in enumerate(sums, 1))


def written(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Tensor:
    """Prompts with what the model says after them."""
    outputs = engine.generate(prompts, params)
    return torch.tensor([p + o.completions[0].tokens for p, o in zip(prompts, outputs, strict=True)])


def main() -> None:
    """Train and measure it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1M")
    given = parser.parse_args().tokens
    tokens = int(float(given.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(given[-1], 1))
    torch.manual_seed(0)
    engine = Engine(SMALL, max_sequences=64)
    make = text_prompts(engine.tokenizer, PROMPT, TextSource("builtin", "evaluation"))
    prompts = [make(PROMPT, seed) for seed in range(REQUESTS)]
    greedy = written(engine, prompts, [SamplingParams(max_tokens=WRITTEN, temperature=0, ignore_eos=True)] * REQUESTS)
    drawn = [SamplingParams(max_tokens=WRITTEN, seed=seed, ignore_eos=True) for seed in range(REQUESTS)]
    sampled = written(engine, prompts, drawn)
    begin = text_prompts(engine.tokenizer, PROMPT, TextSource("builtin", "calibration"))
    windows = min(tokens // LENGTH, 2400)
    lengths = [8 + i % 24 for i in range(windows)]
    text = written(
        engine,
        [begin(length, seed) for seed, length in enumerate(lengths)],
        [
            SamplingParams(max_tokens=LENGTH - length, seed=i, temperature=1.0 if i % 2 else 0.5, ignore_eos=True)
            for i, length in enumerate(lengths)
        ],
    )
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32).eval().requires_grad_(False)
    features = ModelFeatures(model)
    head = trained(model, features, text, tokens)
    rows = []
    for name, form, bits in (("bf16", head, 16.0), ("W4", in_four_bits(head), 4.125)):
        shares = accepted(form, features, greedy)
        speed, count = expected_speed(shares, cost(bits))
        row = {
            "head": name,
            "places": agreement(form, features, sampled),
            "accepted": shares,
            "tokens": 1 + sum(shares),
            "cost": cost(bits),
            "speed": speed,
            "drafts": count,
        }
        print(row, flush=True)
        rows.append(row)
    found = {"tokens": given, "written": WRITTEN, "requests": REQUESTS, "windows": windows, "rows": rows}
    print(save("eagle", f"python -m benchmarks.drafts.eagle --tokens {given}", found))


if __name__ == "__main__":
    main()
