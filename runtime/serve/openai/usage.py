"""How many tokens a request had."""

from __future__ import annotations

from collections.abc import Iterable

from ...requests.output import RequestOutput


def usage(outputs: Iterable[RequestOutput]) -> dict[str, object]:
    """Of the last outputs of a request's prompts."""
    prompts = completions = cached = 0
    for output in outputs:
        prompts += len(output.prompt_tokens)
        completions += sum(len(each.tokens) for each in output.completions)
        cached += output.cached_tokens
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completions,
        "total_tokens": prompts + completions,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
