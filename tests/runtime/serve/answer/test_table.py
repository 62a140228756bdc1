"""Which parser a chat template asks for, from what published templates have of calls and reasoning."""

from __future__ import annotations

import pytest
from smelt.runtime.serve.answer.reasoning import MISTRAL_THINK, THINK, ReasoningTags
from smelt.runtime.serve.answer.table import PARSERS, detect, reasoning_tags

QWEN = (
    r"""{{- "\n</tools>\n\n...<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"""
    r"""</tool_call><|im_end|>\n" }}"""
)
HERMES = """{{- '\\n<tool_call>\\n' }}{{- '{ ' }}{{- '"arguments": ' }}{{- tool_call.arguments|tojson }}"""
QWEN_CODER = r"""{{- '...\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n' }}"""
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
LLAMA = (
    """{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}"""
    """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
)
LLAMA_4 = LLAMA.replace("start_header_id", "header_start").replace("end_header_id", "header_end")
LLAMA_3 = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim }}"
LLAMA_PYTHONIC = LLAMA_3 + "{{- 'Respond in the format [func_name1(params_name1=params_value1), func_name2(params)]' }}"
FUNCTIONARY = LLAMA + "{{ '<function=' + call.name + '>' + call.arguments + '</function>' }}"
NEMOTRON = LLAMA_3 + """<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>"""
MISTRAL_ARRAY = """{{- "[TOOL_CALLS] [" }}{%- for tool_call in tool_calls %}"""
MISTRAL_ARGS = """{{- "[TOOL_CALLS]" + tool_call.function.name + "[ARGS]" + arguments }}"""
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
CHATML = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hermes"),
        (HERMES, "hermes"),
        (QWEN_CODER, None),
        (GLM, None),
        (LLAMA, "llama3_json"),
        (LLAMA.replace('"', '\\"'), "llama3_json"),
        (LLAMA_4, "llama3_json"),
        (LLAMA_3, None),
        (LLAMA_PYTHONIC, None),
        (FUNCTIONARY, None),
        (NEMOTRON, None),
        (MISTRAL_ARRAY, "mistral"),
        (MISTRAL_ARGS, "mistral"),
        (KIMI, None),
        (CHATML, None),
        ("", None),
    ],
)
def test_templates_say_which_parser(template: str, expected: str | None) -> None:
    assert detect(template) == expected
    assert expected is None or expected in PARSERS


def test_each_call_of_the_table_makes_a_new_parser() -> None:
    for make in PARSERS.values():
        first, second = make(), make()
        first.add("a")
        assert second.end() == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{- '<think>\\n\\n</think>\\n\\n' }}", THINK),
        ("{% set content = content.split('</think>')[-1] %}", THINK),
        ("{{ '[THINK]' + message.thinking + '[/THINK]' }}", MISTRAL_THINK),
        (QWEN, None),
        ("", None),
    ],
)
def test_templates_say_which_tags_reasoning_has(template: str, expected: ReasoningTags | None) -> None:
    assert reasoning_tags(template) == expected
