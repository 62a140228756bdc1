"""Reports as they could come out of a run, for tests of how they are shown. The numbers are made up."""

from __future__ import annotations

import math
from typing import Any

from smelt.compress.results.report import ReportData
from smelt.compress.results.result import (
    Against,
    Change,
    Layer,
    Load,
    Machine,
    ModelResult,
    Sample,
    Size,
    Speed,
    Spread,
    TaskChange,
    TaskResult,
    Text,
    TimePart,
)

PARAMETERS = 1_235_814_400
_PROMPTS = ("The oldest mill on the river", "Q: Why is the sky blue?\nA:")
_TEXTS = (
    " was built in 1782, and it ground wheat for the three villages upstream until the flood of 1903. Its wheel"
    " still turns on holidays, when the miller's great-granddaughter opens the sluice for visitors.",
    " Because air scatters short waves of light more than long ones, so that blue reaches the eye from every"
    " direction while red passes straight through.\n\nQ: And at sunset?\nA: Then light has come a long way.",
)
_SHARES = {
    "linears": 0.71,
    "attention, norms and the rest of the layers": 0.16,
    "output head": 0.08,
    "choosing tokens and laying out the step": 0.035,
    "scheduling and text": 0.015,
}


def machine() -> Machine:
    """Two cores of a server."""
    return Machine(
        processor="AMD EPYC 9V74 80-Core Processor",
        threads=2,
        cores=2,
        memory_bytes=16_400_000_000,
        system="Linux 6.8",
        device="cpu",
        read_bytes_per_second=21.4e9,
        operations_per_second=310e9,
        operations_dtype="bfloat16",
    )


def spread(median: float) -> Spread:
    """Five repeats around a median."""
    return Spread(median=median, values=[median * f for f in (0.985, 1.0, 1.012, 0.993, 1.02)])


def text(perplexity: float, interval: bool = True) -> Text:
    """A reading of WikiText-2."""
    each = math.log(perplexity) * 511
    return Text(
        source="wikitext-2 test",
        windows=64,
        length=512,
        perplexity=perplexity,
        perplexity_interval=(perplexity * 0.967, perplexity * 1.034) if interval else None,
        bits_per_byte=math.log2(perplexity) / 4.31,
        nll=[each * (1 + 0.05 * math.sin(i)) for i in range(64)],
        bytes=[2202 + i % 7 for i in range(64)],
        source_sha256="ef" * 32,
        text_sha256="5d" * 32,
        computed_by="Smelt's runtime, in bfloat16",
    )


def task(value: float, name: str = "hellaswag", metric: str = "acc_norm") -> TaskResult:
    """A right-or-wrong task of 200 items."""
    return TaskResult(
        task=name,
        metric=metric,
        filter="none",
        value=value,
        interval=(value - 0.06, value + 0.06),
        higher_is_better=True,
        aggregation="mean",
        items=200,
        by_item=[1.0] * round(200 * value) + [0.0] * (200 - round(200 * value)),
        fewshot=0,
        version="1.0",
    )


def speed(decode: float, prefill: float, bytes_read: int) -> Speed:
    """A checkpoint that decodes and prefills at these rates."""
    limit = 21.4e9 / bytes_read
    return Speed(
        prompt=512,
        generate=64,
        first_token=spread(512 / prefill),
        prefill_rate=spread(prefill),
        decode_rate=spread(decode),
        loads=[
            Load(
                concurrency=c,
                requests=2 * c,
                output_rate=spread(decode * c**0.7),
                first_token_p50=spread(512 / prefill * c**0.8),
                first_token_p99=spread(512 / prefill * c**1.1),
                between_tokens_p50=spread(c**0.3 / decode),
                between_tokens_p99=spread(2.2 * c**0.3 / decode),
            )
            for c in (4, 16)
        ],
        load_seconds=3.8,
        peak_memory_bytes=int(bytes_read * 1.25 + 4e8),
        interleaved=True,
        decode_bytes_per_token=bytes_read,
        decode_limit=limit,
        decode_of_limit=decode / limit,
        prefill_limit=126.0,
        prefill_of_limit=prefill / 126,
        decode_time=[TimePart(name=n, seconds=s / decode) for n, s in _SHARES.items()],
        prefill_time=[TimePart(name=n, seconds=s * 512 / prefill) for n, s in _SHARES.items()],
        kernels={
            "query, key and value": "Smelt's kernel, int4 weights, inputs of 16 bits",
            "attention output": "Smelt's kernel, int4 weights, inputs of 16 bits",
            "gate and up": "Smelt's kernel, int4 weights, inputs of 16 bits",
            "down of layers 0, 1": "torch, bfloat16, stored as int4",
            "head": "torch, bfloat16",
        },
    )


def layers(worst: float) -> list[Layer]:
    """Errors of 112 linears, worst first; one that nothing reached."""
    names = [
        f"model.layers.{i}.{part}"
        for part in ("mlp.down_proj", "self_attn.o_proj", "self_attn.v_proj", "mlp.up_proj", "self_attn.q_proj")
        for i in range(22)
    ]
    known = [
        Layer(name=n, scheme="W4A16", shape=[2048, 8192 if "down" in n else 2048], error=worst * 0.975**i)
        for i, n in enumerate(names)
    ]
    return [
        Layer(name="model.layers.3.mlp.experts.7.down_proj", scheme="W4A16", shape=[2048, 768]),
        *known,
    ]


def _size(bits: float) -> Size:
    return Size(
        bytes=int(PARAMETERS * bits / 8),
        parameters=PARAMETERS,
        bits_per_weight=bits,
        linear_bits_per_weight=bits - 0.4 if bits < 16 else None,
    )


def baseline() -> ModelResult:
    """The original in bfloat16."""
    return ModelResult(
        name="Llama-3.2-1B",
        role="baseline",
        path="/models/Llama-3.2-1B",
        fingerprint="ab" * 32,
        scheme="bfloat16",
        size=_size(16),
        text=text(9.76),
        tasks=[task(0.61), task(0.655, "arc_easy", "acc")],
        speed=speed(7.9, 92, 2_471_000_000),
        samples=[Sample(prompt=p, text=t) for p, t in zip(_PROMPTS, _TEXTS, strict=True)],
    )


def candidate(
    name: str,
    bits: float,
    perplexity_ratio: float,
    decode_ratio: float,
    prefill_ratio: float,
    noisy: bool = False,
    reasons: tuple[str, ...] = (),
    errors: float | None = None,
    same_text: bool = False,
) -> ModelResult:
    """A candidate beside :func:`baseline`."""

    def change(ratio: float, width: float = 0.03) -> Change:
        bounds = (ratio * (1 - width), ratio * (1 + width))
        return Change(ratio=ratio, interval=bounds, significant=not bounds[0] <= 1 <= bounds[1])

    size = _size(bits)
    drop = 0.4 * (perplexity_ratio - 1)
    turned = [t.replace("visitors", "guests").replace("the eye", "us") for t in _TEXTS]
    return ModelResult(
        name=name,
        role="candidate",
        path=f"runs/{name}/checkpoint",
        fingerprint="cd" * 32,
        scheme=name.split()[0],
        size=size,
        text=text(9.76 * perplexity_ratio),
        tasks=[task(0.61 - drop), task(0.655 - drop / 2, "arc_easy", "acc")],
        speed=speed(7.9 * decode_ratio, 92 * prefill_ratio, size.bytes),
        samples=[Sample(prompt=p, text=t) for p, t in zip(_PROMPTS, _TEXTS if same_text else turned, strict=True)],
        layers=layers(errors) if errors else [],
        recipe={"model": "Llama-3.2-1B", "seed": 0, "steps": [{"quantize": {"scheme": name.split()[0]}}]},
        reload={"sentence": "transformers restores every weight bit for bit", "exact": True},
        against=Against(
            perplexity=change(perplexity_ratio, 0.05 if noisy else 0.006),
            bits_per_byte=change(1 + (perplexity_ratio - 1) * 0.4, 0.05 if noisy else 0.002),
            kl=0.9 * (perplexity_ratio - 1) + 0.001,
            kl_interval=(0.8 * (perplexity_ratio - 1), 1.1 * (perplexity_ratio - 1) + 0.002),
            top1_agreement=0.99 - 0.7 * (perplexity_ratio - 1),
            top1_interval=(0.98 - 0.7 * (perplexity_ratio - 1), 0.994 - 0.7 * (perplexity_ratio - 1)),
            tasks=[
                TaskChange(
                    task="hellaswag",
                    metric="acc_norm",
                    filter="none",
                    difference=-drop,
                    interval=(-drop - 0.02, -drop + 0.02),
                    significant=drop > 0.02,
                    gained=4,
                    lost=4 + round(200 * drop),
                    p_value=0.0004 if drop > 0.02 else 0.42,
                )
            ],
            size=Change(ratio=bits / 16),
            memory=Change(ratio=(bits / 16 * 1.25 + 0.16) / 1.41),
            prefill=change(prefill_ratio),
            decode=change(decode_ratio),
            loads={"4": change(decode_ratio * 0.9), "16": change(decode_ratio * 0.7)},
            predicted_decode=16 / bits,
            reasons=list(reasons),
        ),
        warnings=["1 linear was rounded to nearest: no calibration token reached it."] if errors else [],
    )


def report(models: list[ModelResult], **changes: Any) -> ReportData:
    """A report of these models."""
    data: dict[str, Any] = {
        "title": "Llama-3.2-1B in 4 and 8 bits",
        "status": "complete",
        "verdict": "W4A16 gptq decodes 2.9× faster in 3.4× fewer bytes; its perplexity rises by 1.8%.",
        "machine": machine(),
        "versions": {"smelt": "0.1.0", "torch": "2.9.1", "transformers": "5.17.0"},
        "settings": {"text": {"source": "wikitext-2 test", "windows": 64, "length": 512}, "concurrency": [1, 4, 16]},
        "models": models,
    }
    return ReportData(**data | changes)


def full() -> ReportData:
    """A baseline and three candidates, one of them slower than the baseline."""
    return report(
        [
            baseline(),
            candidate("W4A16 gptq", 4.7, 1.018, 2.9, 1.21, errors=0.11),
            candidate("W8A16 rtn", 8.3, 1.001, 1.72, 0.99, noisy=True, same_text=True),
            candidate(
                "W3A16 hqq",
                3.9,
                1.142,
                0.77,
                0.46,
                errors=0.34,
                reasons=("48 linears of 3 bits are unpacked before they are multiplied: no kernel reads them packed.",),
            ),
        ],
        warnings=["The machine was busy with other work for 4% of the time."],
    )


def minimal() -> ReportData:
    """One model, no baseline, only a text."""
    alone = baseline().model_copy(
        update={"role": "candidate", "tasks": [], "speed": None, "samples": [], "text": text(9.76, interval=False)}
    )
    return report([alone], title="Llama-3.2-1B", verdict="Perplexity 9.76; nothing to compare it with.")


def partial() -> ReportData:
    """The speed of one candidate was not measured."""
    original, first, second, _ = full().models
    assert second.against is not None
    rest = second.against.model_copy(update={"prefill": None, "decode": None, "loads": {}, "memory": None})
    return report(
        [original, first, second.model_copy(update={"speed": None, "against": rest})],
        status="partial",
        missing=["speed of W8A16 rtn: the process was stopped", "tasks of W8A16 rtn"],
    )


def sweep(count: int = 24) -> ReportData:
    """A baseline and many candidates."""
    models = [baseline()]
    for i in range(count):
        bits = (2.3, 3.4, 4.2, 4.5, 6.4, 8.2)[i % 6]
        loss = 1 + (0.9 / bits**2) * (1 + i // 6 * 0.35)
        fast = (16 / bits) ** 0.75 * (1 - 0.06 * (i // 6))
        method = ("gptq g64", "gptq g128", "hqq g64", "rtn g128")[i // 6 % 4]
        models.append(
            candidate(f"W{int(bits)}A16 {method}", bits, loss, fast, 1 + 0.03 * i, errors=0.5 / bits, noisy=loss < 1.02)
        )
    return report(models, title="A sweep of Llama-3.2-1B")


def hostile() -> ReportData:
    """Names and texts that would run, or break the page, if they were not escaped."""
    image = "<img src=x onerror=alert(1)>"
    original, first, *_ = full().models
    bad = first.model_copy(
        update={
            "name": image,
            "scheme": "</script><script>alert(2)</script>",
            "warnings": ["</style><b>bold</b>"],
            "path": "\"'><svg onload=alert(3)>",
            "samples": [Sample(prompt=p, text="\x00\x1b[31m<!--<script>\u202e" + image) for p in _PROMPTS],
            "layers": [Layer(name=f"{image}.{'x' * 300}", scheme="&amp;", shape=[1, 1], error=0.5)],
            "recipe": {"model": "</pre><script>alert(4)</script>"},
        }
    )
    return report(
        [original, bad], title="</title><script>alert(5)</script>", verdict="]]> &lt;b&gt; </script><!-- <script>"
    )
