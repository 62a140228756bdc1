"""How many tokens a request had."""

from __future__ import annotations

from collections.abc import Iterable

from ...requests.output import RequestOutput

UPPER_BITS = "upper-bits"


def backend(output: RequestOutput) -> dict[str, object]:
    """What a response or chunk says of what computed it, besides the model: OpenAI's ``system_fingerprint``."""
    return {"system_fingerprint": UPPER_BITS} if output.upper_bits else {}


def usage(outputs: Iterable[RequestOutput]) -> dict[str, object]:
    """Of the last outputs of a request's prompts."""
    prompts = completions = cached = drafted = accepted = 0
    upper = False
    for output in outputs:
        prompts += len(output.prompt_token_ids)
        completions += sum(len(each.token_ids) for each in output.outputs)
        cached += output.num_cached_tokens
        drafted += output.draft_tokens
        accepted += output.accepted_tokens
        upper = upper or output.upper_bits
    found: dict[str, object] = {
        "prompt_tokens": prompts,
        "completion_tokens": completions,
        "total_tokens": prompts + completions,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if upper:
        found["upper_bits"] = True
    if drafted:
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return found
