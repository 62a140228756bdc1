"""How many tokens a request had."""

from __future__ import annotations

from collections.abc import Iterable

from ...requests.output import RequestOutput


def usage(outputs: Iterable[RequestOutput]) -> dict[str, object]:
    """Of the last outputs of a request's prompts."""
    prompts = completions = cached = drafted = accepted = 0
    for output in outputs:
        prompts += len(output.prompt_tokens)
        completions += sum(len(each.tokens) for each in output.completions)
        cached += output.cached_tokens
        drafted += output.draft_tokens
        accepted += output.accepted_tokens
    found: dict[str, object] = {
        "prompt_tokens": prompts,
        "completion_tokens": completions,
        "total_tokens": prompts + completions,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if drafted:
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return found
