"""The parsers, by vLLM's names, and which of them a model's chat template asks for."""

from __future__ import annotations

import re
from collections.abc import Callable

from .hermes import HermesParser
from .llama3_json import Llama3JsonParser
from .mistral import MistralParser
from .parts import Parser
from .reasoning import MISTRAL_THINK, THINK, ReasoningTags

PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}

_PARAMETERS = re.compile(r"""["']parameters["']\s*:""")
# Calls in XML: Qwen3-Coder's and GLM's within Hermes's tags, functionary's within Llama's.
_XML = ("<function=", "<arg_key>")
_LLAMA_HEADERS = ("<|start_header_id|>", "<|header_start|>")


def detect(chat_template: str) -> str | None:
    """The name of the parser for what a template shows the model of calls; None if it shows none that is known."""
    template = chat_template.replace("\\", "")
    if any(tag in template for tag in _XML):
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if any(header in template for header in _LLAMA_HEADERS) and _PARAMETERS.search(template):
        return "llama3_json"
    return None


def reasoning_tags(chat_template: str) -> ReasoningTags | None:
    """The tags that a template has around reasoning; None if it knows none."""
    for tags in (MISTRAL_THINK, THINK):
        if tags.opening in chat_template or tags.closing in chat_template:
            return tags
    return None
