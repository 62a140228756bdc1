"""Which parsers of other engines read a model's tool calls and reasoning, from its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...models.directory.directory import ModelDirectory
from ...runtime.serve.answer.table import detect, reasoning_tags

# SGLang's names for vLLM's parsers.
_SGLANG_TOOLS = {"hermes": "qwen", "llama3_json": "llama3", "mistral": "mistral"}
_SGLANG_REASONING = {"qwen3": "qwen3", "deepseek_r1": "deepseek-r1", "mistral": "mistral"}


@dataclass(frozen=True)
class TemplateParsers:
    """The parsers by vLLM's names; None where the template shows no format that is known.

    Attributes:
        tools: of calls.
        reasoning: of thinking.
    """

    tools: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, directory: Path, model_type: str) -> TemplateParsers:
        """Those of a checkpoint.

        Args:
            directory: of the checkpoint.
            model_type: of its configuration.
        """
        opened = ModelDirectory(str(directory), directory)
        template = opened.tokenizer().chat_template if opened.has_tokenizer else None
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        if not isinstance(template, str):
            return cls()
        tags = reasoning_tags(template)
        thinks = None if tags is None else "mistral" if tags.opening == "[THINK]" else None
        if tags is not None and thinks is None:
            thinks = "qwen3" if model_type.startswith("qwen3") else "deepseek_r1"
        return cls(detect(template), thinks)

    @property
    def sglang_tools(self) -> str | None:
        """SGLang's name of the parser of calls."""
        return None if self.tools is None else _SGLANG_TOOLS[self.tools]

    @property
    def sglang_reasoning(self) -> str | None:
        """SGLang's name of the parser of thinking."""
        return None if self.reasoning is None else _SGLANG_REASONING[self.reasoning]
