"""Does the checkpoint that was written say what was meant? transformers is asked, not ourselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..quant.scheme import Scheme
from .compressed import compressed_view
from .errors import SmeltError
from .model_directory import ModelDirectory
from .open_model import OpenModel
from .progress import Progress
from .resources import available_memory, human_bytes

_WINDOWS = 2
_LENGTH = 64


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


def reload(model: OpenModel, checkpoint: Path, scheme: Scheme, tokens: Tensor, spill: Path) -> Reload:
    """Load ``checkpoint`` with transformers and compare its logits with those of our dequantized model.

    Both compute in the checkpoint's own type. Where transformers runs the same operations on the same
    numbers the difference is zero; it may run experts in another order, so rounding is allowed for.

    Raises:
        SmeltError: the checkpoint does not load, or computes something else.
    """
    from transformers import AutoModelForCausalLM

    dtype = model.dtype
    tokens = tokens[:_WINDOWS, :_LENGTH]
    directory = ModelDirectory(str(checkpoint), checkpoint, model.directory.trust_remote_code)
    ours = compressed_view(model, directory, scheme, dtype, spill)
    allowed = 64 * torch.finfo(dtype).eps
    needed = int(2.2 * model.weights.nbytes)
    free = available_memory()
    if needed > free:
        # Every tensor is still read back, restored and run; only transformers' own loading is not tried.
        store = ours.final_hidden(tokens, Progress(False), "")
        finite = torch.isfinite(store.read(slice(None))).all()
        store.close()
        if not finite:
            raise SmeltError(f"{checkpoint}: the written checkpoint computes NaN; this is a bug in Smelt, please report it")
        sentence = (
            f"read back block by block; not loaded whole in transformers, which needs about {human_bytes(needed)}"
            f" ({human_bytes(free)} available)"
        )
        return Reload("streamed", None, allowed, sentence)
    store = ours.final_hidden(tokens, Progress(False), "")
    with ours.head() as head:
        expected = head(store.read(slice(None)))
    store.close()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, trust_remote_code=model.directory.trust_remote_code, local_files_only=True
        ).eval()
        with torch.no_grad():
            found = loaded(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # whatever transformers raises, the checkpoint is not fit to be published
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise SmeltError(f"{checkpoint}: transformers does not load what was written ({first}); nothing was published") from error
    difference = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    if not difference <= allowed:
        raise SmeltError(
            f"{checkpoint}: after reloading, logits differ by {difference:.2e} of the largest (allowed {allowed:.1e});"
            " nothing was published, please report this"
        )
    sentence = f"reloaded with transformers; logits differ by at most {difference:.1e} of the largest (allowed {allowed:.1e})"
    return Reload("transformers", difference, allowed, sentence)
