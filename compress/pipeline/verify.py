"""Checks that the written checkpoint is right, by loading it with transformers rather than our own code."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.directory import ModelDirectory
from ...models.directory.layer_sizes import LAYER_SIZES
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...quant.stored.compressed import CompressedModel
from ...system.errors import SmeltError, first_line
from ...system.hardware.machine import available_memory, human_bytes
from ...system.hardware.resources import release_freed_memory
from ...system.progress import Progress
from ..verification.claims import LogitsClaim
from ..verification.logits import logits_claim, rounding_by_token
from .lockstep import Lockstep

_WINDOWS = 2
_LENGTH = 64
# So far exactly zero, in every architecture and scheme. This leaves room for other CPU kernels.
_ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Reload:
    """The result of the reload check.

    Attributes:
        through: ``transformers``, or ``streamed`` when the dense model would not fit in memory.
        largest_difference: between transformers' logits and those of our dequantized model, relative
            to the largest logit; None when streamed.
        allowed: the largest difference allowed.
        sentence: what was done.
        logits: what transformers computed, to be claimed of the checkpoint; None when streamed.
    """

    through: str
    largest_difference: float | None
    allowed: float
    sentence: str
    logits: LogitsClaim | None = None

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON, without the logits."""
        return {name: getattr(self, name) for name in ("through", "largest_difference", "allowed", "sentence")}


def whole_model_bytes(model: OpenModel) -> int:
    """Memory that transformers needs to load a checkpoint of this model and dequantize all of it."""
    return int(2.2 * model.weights.nbytes)


def reload_bytes(model: OpenModel, stored: int | None) -> int:
    """Memory needed to check a checkpoint.

    Args:
        model: the model it was made from.
        stored: the checkpoint's bytes, if transformers keeps it packed; None if it dequantizes on loading.
    """
    if stored is None:
        return whole_model_bytes(model)
    # Theirs and ours of one block, twice while dequantizing; the embedding, and an untied lm_head.
    block = 4 * model.largest_block() * model.dtype.itemsize
    return stored + block + (1 if model.is_tied else 2) * model.embedding_bytes()


def random_windows(model: OpenModel) -> Tensor:
    """Windows for checking a checkpoint without text: random tokens, always the same."""
    shape = (_WINDOWS, min(_LENGTH, model.context() or _LENGTH))
    return torch.randint(model.vocabulary(), shape, generator=torch.Generator().manual_seed(0))


def reload(model: OpenModel, checkpoint: Path, tokens: Tensor, spill: Path) -> Reload:
    """Load ``checkpoint`` with transformers and compare its logits with those of our dequantized model.

    Both compute in the checkpoint's dtype. If transformers runs the same operations on the same
    values the difference is zero; it may sum experts in another order, so rounding is allowed for.

    Raises:
        SmeltError: the checkpoint does not load, or its logits differ.
    """
    dtype = model.dtype
    tokens = tokens[:_WINDOWS, :_LENGTH]
    directory = ModelDirectory(str(checkpoint), checkpoint, model.directory.trust_remote_code)
    compressed = CompressedModel(model, directory)
    ours = compressed.view(dtype, spill, round_expert_inputs=False)
    allowed = _ALLOWED[dtype]
    arguments, how, packed = _what_loading_needs(compressed, checkpoint)
    needed = reload_bytes(model, packed)
    if needed > available_memory():
        # Every tensor is still read back, dequantized and run; only loading with transformers is skipped.
        store = ours.final_hidden(tokens, Progress(False), "")
        finite = torch.isfinite(store.read(slice(None))).all()
        store.close()
        if not finite:
            raise SmeltError(
                f"{checkpoint}: the written checkpoint computes NaN; this is a bug in Smelt, please report it"
            )
        sentence = (
            f"read back block by block, not loaded with transformers, which needs about {human_bytes(needed)} of memory"
        )
        return Reload("streamed", None, allowed, sentence)
    release_freed_memory()
    found, expected = _both(checkpoint, compressed, ours, tokens, arguments, trust=model.directory.trust_remote_code)
    release_freed_memory()
    if not (torch.isfinite(expected).all() and expected.abs().max() > 0):
        raise SmeltError(
            f"{checkpoint}: the model itself computes logits that are {'all zero' if torch.isfinite(expected).all() else 'not finite'};"
            " nothing was published. If it was trained, train it again with a lower learning_rate; otherwise look at the steps before"
        )
    difference = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    if not difference <= allowed:
        raise SmeltError(
            f"{checkpoint}: after reloading, logits differ by {difference:.2e} of the largest (allowed {allowed:.1e});"
            " nothing was published, please report this"
        )
    logits = (
        "are too" if difference == 0 else f"differ by at most {difference:.1e} of the largest (allowed {allowed:.0e})"
    )
    sentence = f"reloaded with transformers{how}; its weights are identical, and its logits {logits}"
    if compressed.input_roundings().keys() != compressed.input_roundings(of_experts=False).keys():
        sentence += ". Transformers does not round experts' inputs, as servers do, whose logits differ by that"
    return Reload("transformers", difference, allowed, sentence, logits_claim(tokens, found, arguments))


def _what_loading_needs(compressed: CompressedModel, checkpoint: Path) -> tuple[dict[str, Any], str, int | None]:
    """Arguments of ``from_pretrained`` for this checkpoint, their text in a report, and the bytes that stay packed."""
    if getattr(compressed.model.config, LAYER_SIZES, None) is not None:
        return _with_plug_in(compressed, checkpoint, "which blocks of different sizes need")
    experts = any(facts.is_expert for facts in compressed.model.linears.values())
    if compressed.schemes is None:
        return {}, "", compressed.stored_bytes
    kept = compressed.schemes.keys_values
    if kept is not None and kept.dynamic is True:
        return _with_plug_in(compressed, checkpoint, "which quantizes the KV cache as Smelt does")
    needs = compressed.schemes.needs(CheckpointWeights(checkpoint).names())
    if needs == "nothing":
        return {}, "", None if experts else compressed.stored_bytes  # experts are dequantized to be fused
    if needs == "plug-in":
        zeros = not all(scheme.args.symmetric for scheme in compressed.schemes.used)
        return _with_plug_in(compressed, checkpoint, f"which its {'zero-points' if zeros else 'experts'} need")
    from transformers import CompressedTensorsConfig

    dequantized = CompressedTensorsConfig(dequantize=True)
    how = " and quantization_config=CompressedTensorsConfig(dequantize=True), which zero-points need"
    return {"quantization_config": dequantized}, how, None


def _with_plug_in(compressed: CompressedModel, checkpoint: Path, why: str) -> tuple[dict[str, Any], str, None]:
    from ..integrations.transformers import config_for

    arguments = {"config": config_for(checkpoint, trust_remote_code=compressed.model.directory.trust_remote_code)}
    return arguments, f" and config=smelt.compress.config_for(…), {why}", None


def _both(
    checkpoint: Path,
    compressed: CompressedModel,
    ours: StreamedModel,
    tokens: Tensor,
    arguments: dict[str, Any],
    *,
    trust: bool,
) -> tuple[Tensor, Tensor]:
    """The logits of the checkpoint in transformers, and ours; every weight has been compared."""
    from transformers import AutoModelForCausalLM

    try:
        with redirect_stderr(io.StringIO()):  # progress bars that libraries always draw
            loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
                checkpoint,
                dtype=ours.dtype,
                trust_remote_code=trust,
                local_files_only=True,
                **arguments,
                experts_implementation="eager",  # sums experts in our order, so that no token's routing changes
            ).eval()
            # What routers return would be looked for in blocks, which are stepped through one by one.
            loaded.config.output_router_logits = False  # pyright: ignore[reportAttributeAccessIssue]
            with rounding_by_token():
                both = Lockstep(checkpoint, loaded, compressed, ours).logits(tokens)
            nn.Module.to(loaded, "meta")  # it has reference cycles, so its weights would linger
            return both
    except SmeltError:
        raise
    except Exception as error:  # on any error of transformers, the checkpoint must not be published
        raise SmeltError(
            f"{checkpoint}: transformers does not load what was written ({first_line(error)}); nothing was published"
        ) from error
