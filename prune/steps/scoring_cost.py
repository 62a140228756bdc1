"""The cost of scoring what is removed alike from all blocks, and of writing the smaller model."""

from __future__ import annotations

from ...models.streaming.streamed import LOGIT_TOKENS
from ...models.structure.open_model import OpenModel
from ...system.hardware.resources import Cost, compute_dtype
from ...system.storage.activation_store import BATCH_TOKENS


def scoring_cost(
    model: OpenModel, windows: int, length: int, *, tables: int = 1, matrices: int = 0, gradients: float | None = None
) -> Cost:
    """The cost of one pass that scores and one that runs the smaller model.

    Args:
        model: the model.
        windows: calibration windows.
        length: their tokens.
        tables: embedding tables held at once.
        matrices: bytes of matrices held beside a block.
        gradients: if the score needs gradients, the factor by which operations grow.
    """
    tokens, itemsize = windows * length, compute_dtype(model.dtype).itemsize
    hidden, blocks = model.skeleton.hidden_size, len(model.anatomy.blocks)
    width = max(facts.rows for facts in model.block_linears)
    passing = max(BATCH_TOKENS, length) * 4 * max(width, hidden) * itemsize
    memory = max(model.largest_block() * itemsize + passing + matrices, tables * model.embedding_bytes())
    operations = 4.0 * tokens * sum(model.block_numels)
    kept = hidden
    if gradients is not None:
        logits = max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 4
        memory = max(memory + 2 * passing, model.embedding_bytes() + logits)
        operations *= gradients
        kept += (blocks + 2) * hidden
    return Cost(int(memory), int(2 * model.weights.nbytes + tokens * kept * itemsize), operations)
