"""Does the checkpoint that was written say what was meant? transformers is asked, not ourselves."""

from __future__ import annotations

import gc
import io
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.machine import available_memory, human_bytes
from .compressed import CompressedModel
from .errors import SmeltError
from .model_directory import ModelDirectory
from .open_model import OpenModel
from .progress import Progress
from .resources import memory_returned_at_once, release_freed_memory

_WINDOWS = 2
_LENGTH = 64
# Seen so far: exactly zero, in every architecture and scheme. This leaves room for another choice of CPU kernel.
_ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Reload:
    """How the reload check went.

    Attributes:
        through: ``transformers``, or ``streamed`` when the dense model would not fit in memory.
        largest_difference: between transformers' logits and those of our dequantized model, relative
            to the largest logit; None when streamed.
        allowed: the most that it may be.
        sentence: what was done.
    """

    through: str
    largest_difference: float | None
    allowed: float
    sentence: str

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


def whole_reload_bytes(model: OpenModel) -> int:
    """Memory that transformers takes to load and restore a checkpoint of this model."""
    return int(2.2 * model.weights.nbytes)


def reload(model: OpenModel, checkpoint: Path, tokens: Tensor, spill: Path) -> Reload:
    """Load ``checkpoint`` with transformers and compare its logits with those of our dequantized model.

    Both compute in the checkpoint's own type. Where transformers runs the same operations on the same
    numbers the difference is zero; it may run experts in another order, so rounding is allowed for.

    Raises:
        SmeltError: the checkpoint does not load, or computes something else.
    """
    dtype = model.dtype
    tokens = tokens[:_WINDOWS, :_LENGTH]
    directory = ModelDirectory(str(checkpoint), checkpoint, model.directory.trust_remote_code)
    compressed = CompressedModel(model, directory)
    ours = compressed.view(dtype, spill, round_expert_inputs=False)
    allowed = _ALLOWED[dtype]
    needed = whole_reload_bytes(model)
    if needed > available_memory():
        # Every tensor is still read back, restored and run; only transformers' own loading is not tried.
        store = ours.final_hidden(tokens, Progress(False), "")
        finite = torch.isfinite(store.read(slice(None))).all()
        store.close()
        if not finite:
            raise SmeltError(
                f"{checkpoint}: the written checkpoint computes NaN; this is a bug in Smelt, please report it"
            )
        sentence = f"read back block by block; not loaded whole in transformers, which needs about {human_bytes(needed)} of memory"
        return Reload("streamed", None, allowed, sentence)
    store = ours.final_hidden(tokens, Progress(False), "")
    expected = ours.head()(store.read(slice(None)))
    store.close()
    release_freed_memory()
    with memory_returned_at_once():
        told, how = _what_loading_needs(compressed, checkpoint)
        loaded, found = _through_transformers(checkpoint, dtype, tokens, told, trust=model.directory.trust_remote_code)
        _compare_weights(checkpoint, loaded, compressed)
        del loaded
        gc.collect()  # transformers' models refer to themselves
    release_freed_memory()
    difference = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    if not difference <= allowed:
        raise SmeltError(
            f"{checkpoint}: after reloading, logits differ by {difference:.2e} of the largest (allowed {allowed:.1e});"
            " nothing was published, please report this"
        )
    logits = (
        "are too" if difference == 0 else f"differ by at most {difference:.1e} of the largest (allowed {allowed:.0e})"
    )
    sentence = f"reloaded with transformers{how}; its weights are exactly ours, and its logits {logits}"
    if how:
        sentence += "; vLLM, which documents this layout, was not tried"
    return Reload("transformers", difference, allowed, sentence)


def _what_loading_needs(compressed: CompressedModel, checkpoint: Path) -> tuple[dict[str, Any], str]:
    """What ``from_pretrained`` must be told of this checkpoint, and how a report says it."""
    model = compressed.model
    needs = compressed.schemes.needs(experts=any(facts.is_expert for facts in model.linears.values()))
    if needs == "nothing":
        return {}, ""
    if needs == "plug-in":
        from .transformers_plugin import config_for

        config = config_for(checkpoint, trust_remote_code=model.directory.trust_remote_code)
        return {"config": config}, " and config=smelt.compress.config_for(…), which its zero-points need there"
    from transformers import CompressedTensorsConfig

    dequantized = CompressedTensorsConfig(dequantize=True)
    how = " and quantization_config=CompressedTensorsConfig(dequantize=True), which zero-points need there"
    return {"quantization_config": dequantized}, how


def _through_transformers(
    checkpoint: Path, dtype: torch.dtype, tokens: Tensor, told: dict[str, Any], *, trust: bool
) -> tuple[nn.Module, Tensor]:
    from transformers import AutoModelForCausalLM

    try:
        with redirect_stderr(io.StringIO()):  # bars that libraries draw in any case
            loaded = AutoModelForCausalLM.from_pretrained(
                checkpoint,
                dtype=dtype,
                trust_remote_code=trust,
                local_files_only=True,
                **told,
                experts_implementation="eager",  # sums experts in our order, so that no token changes its route
            ).eval()
            with torch.no_grad():
                return loaded, loaded(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # whatever transformers raises, the checkpoint is not fit to be published
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise SmeltError(
            f"{checkpoint}: transformers does not load what was written ({first}); nothing was published"
        ) from error


def _compare_weights(checkpoint: Path, loaded: nn.Module, ours: CompressedModel) -> None:
    """The embedding, and every linear that transformers kept as one, must hold, bit for bit, what our checkpoint stands for."""
    model = ours.model
    keys = {facts.name: facts.key for facts in model.linears.values()}
    embedding = model.skeleton.embedding_name
    for name, key in [(embedding, model.names[f"{embedding}.weight"]), *keys.items()]:
        try:
            weight = loaded.get_submodule(name).weight
        except AttributeError:  # an expert, fused with its neighbours
            continue
        if not torch.equal(weight.cpu(), ours.weights.load(key).to(weight.dtype)):  # type: ignore[union-attr, operator, arg-type]
            raise SmeltError(
                f"{checkpoint}: {name} reloads with other weights; nothing was published, please report this"
            )
