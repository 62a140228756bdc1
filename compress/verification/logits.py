"""The log probabilities that transformers gives some tokens with a checkpoint, then and now."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...models.directory.find import find_checkpoint
from ...models.directory.inspection import inspect
from ...system.errors import SmeltError, first_line
from ...system.hardware.machine import available_memory, human_bytes
from ...system.hardware.resources import release_freed_memory
from ...system.storage.files import read_json
from .claims import LogitsClaim
from .finding import Finding

# How far a log probability may be off on another processor, which rounds and adds in another order.
_ALLOWED = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 2.5e-1}
_DIGITS = 5
_CLAIM = "the logits"


@contextmanager
def rounding_by_token() -> Iterator[None]:
    """Let compressed-tensors round each token by itself also where a model flattens its inputs to ``[tokens, width]``.

    It takes one scale for all of these, unlike vLLM and Smelt, so that a token's logits depend on its neighbours; that is not what
    the checkpoint says, and no fault in what was written.
    """
    from compressed_tensors.quantization.lifecycle import forward

    theirs = forward.compute_dynamic_scales_and_zp

    def by_token(value: Tensor, args: Any, module: nn.Module, global_scale: Tensor | None = None) -> Any:
        if value.dim() > 2 or args.strategy != "token":
            return theirs(value, args, module, global_scale)
        scale, zero = theirs(value[None], args, module, global_scale)
        return scale[0], None if zero is None else zero[0]

    with patch.object(forward, "compute_dynamic_scales_and_zp", by_token):
        yield


def logits_claim(tokens: Tensor, logits: Tensor, arguments: dict[str, Any]) -> LogitsClaim:
    """What to claim of a checkpoint that was reloaded.

    Args:
        tokens: windows of token ids.
        logits: transformers' of them.
        arguments: that it was loaded with.
    """
    how: Literal["plain", "dequantized", "plug-in"] = "plain"
    if arguments:
        how = "plug-in" if "config" in arguments else "dequantized"
    return LogitsClaim.model_validate(
        {
            "tokens": tokens.tolist(),
            "logprobs": [[round(each, _DIGITS) for each in row] for row in _logprobs(tokens, logits).tolist()],
            "dtype": str(logits.dtype).removeprefix("torch."),
            "loaded": how,
        }
    )


def check_logits(checkpoint: Path, claim: LogitsClaim, *, trust_remote_code: bool = False) -> Finding:
    """Load a checkpoint with transformers again and compare.

    Args:
        checkpoint: its directory.
        claim: on it.
        trust_remote_code: run Python code that comes with it.
    """
    dtype: torch.dtype = getattr(torch, claim.dtype)
    tokens = torch.tensor(claim.tokens)
    try:
        parameters = sum(group.numel for group in inspect(str(checkpoint)).groups)
        needed, available = int(1.5 * parameters * dtype.itemsize), available_memory()
        if needed > available:
            why = f"transformers needs about {human_bytes(needed)} of memory, and {human_bytes(available)} is available"
            return Finding(_CLAIM, "not measurable here", why)
        found = _logprobs(tokens, _logits(checkpoint, tokens, claim, dtype, trust_remote_code=trust_remote_code))
    except ImportError as error:
        return Finding(_CLAIM, "not measurable here", f"transformers needs another package to load it ({error})")
    except Exception as error:  # whatever transformers raises for a checkpoint that it does not load
        if not trust_remote_code and _has_code(checkpoint):
            return Finding(
                _CLAIM, "not measurable here", "it comes with Python code; pass --trust-remote-code to run it"
            )
        return Finding(_CLAIM, "not confirmed", f"transformers does not load the checkpoint ({first_line(error)})")
    apart = (found - torch.tensor(claim.logprobs)).abs().max().item()
    allowed = _ALLOWED[claim.dtype]
    why = f"loaded with transformers, log probabilities of {found.numel()} tokens differ by at most {apart:.1g} (allowed {allowed:g})"
    return Finding(_CLAIM, "confirmed" if apart <= allowed else "not confirmed", why)


def _logprobs(tokens: Tensor, logits: Tensor) -> Tensor:
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def _logits(
    checkpoint: Path, tokens: Tensor, claim: LogitsClaim, dtype: torch.dtype, *, trust_remote_code: bool
) -> Tensor:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    from ..integrations.transformers import config_for

    directory = find_checkpoint(str(checkpoint), trust_remote_code=trust_remote_code)
    vocabulary = directory.config_data().get("vocab_size")
    if isinstance(vocabulary, int) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise SmeltError("the record names tokens that it does not have")
    arguments: dict[str, Any] = {}
    if claim.loaded == "plug-in":
        arguments["config"] = config_for(checkpoint, trust_remote_code=trust_remote_code)
    elif claim.loaded == "dequantized":
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with redirect_stderr(io.StringIO()):  # progress bars that libraries always draw
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            experts_implementation="eager",
            **arguments,
        ).eval()
        with rounding_by_token():
            found: Tensor = model(input_ids=tokens, use_cache=False).logits
    del model
    gc.collect()  # it has reference cycles, so its weights would linger
    release_freed_memory()
    return found


def _has_code(checkpoint: Path) -> bool:
    try:
        return "auto_map" in read_json(checkpoint / "config.json", "a config")
    except SmeltError:
        return False
