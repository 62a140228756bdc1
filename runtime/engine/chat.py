"""Chat with a checkpoint on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ...models.text.chat_template import conversation_text
from ...system.errors import RuntimeProblem, SmeltError
from ..requests.params import SamplingParams
from .engine import Engine

HELP = "/reset clears the conversation, /quit (or end of file) exits, Ctrl-C stops an answer"


class Chat:
    """A conversation. Earlier turns stay in the engine's cache, so each answer computes only what is new.

    Args:
        engine: the engine.
        params: sampling parameters.
        system: a system message, for templates that support one.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        if engine.tokenizer is None:
            raise RuntimeProblem("the checkpoint has no tokenizer, which chat needs")
        self._engine = engine
        self._params = params
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._plain = ""
        self.has_template = bool(getattr(engine.tokenizer, "chat_template", None))
        self.reset()

    def reset(self) -> None:
        """Clear the conversation."""
        self._turns = [{"role": "system", "content": self._system}] if self._system else []
        self._plain = ""

    def answer(self, message: str, write: Callable[[str], object]) -> str:
        """Answer a message, streaming the text. After an interruption the text so far is kept.

        Returns:
            A line about the speed.

        Raises:
            SmeltError: the conversation has become too long, or the model's template fails on it.
        """
        prompt = self._prompt(message)
        begun = time.perf_counter()
        first = None
        name = self._engine.add_request(prompt, replace(self._params, n=1))
        said, count, drafted, accepted = "", 0, 0, 0
        try:
            while self._engine.has_work:
                for output in self._engine.step():
                    completion = output.outputs[0]
                    first = first or time.perf_counter()
                    text, count = completion.text or "", len(completion.token_ids)
                    drafted, accepted = output.draft_tokens, output.accepted_tokens
                    write(text[len(said) :])
                    said = text
        except KeyboardInterrupt:
            self._engine.abort(name)
        self._turns += [{"role": "user", "content": message}, {"role": "assistant", "content": said}]
        self._plain += message + said
        ended = time.perf_counter()
        if first is None:
            return "interrupted before the first token"
        rate = f", then {(count - 1) / (ended - first):.1f} tokens/s" if count > 1 else ""
        drafts = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
        return f"{len(prompt)} prompt tokens, first token after {first - begun:.2f} s{rate}{drafts}"

    def _prompt(self, message: str) -> list[int]:
        tokenizer = self._engine.tokenizer
        if not self.has_template:
            return list(tokenizer(self._plain + message).input_ids)
        turns = [*self._turns, {"role": "user", "content": message}]
        text = conversation_text(tokenizer, turns)
        return list(tokenizer(text, add_special_tokens=False).input_ids)


def converse(chat: Chat, read: Callable[[str], str], write: Callable[[str], object]) -> None:
    """Chat until the end of input."""
    write(HELP + "\n")
    if not chat.has_template:
        write("the checkpoint has no chat template: your input is continued as plain text\n")
    while True:
        try:
            message = read("> ")
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if message.strip() == "/quit":
            return
        if message.strip() == "/reset":
            chat.reset()
            write("conversation cleared\n")
        elif message.startswith("/"):
            write(f"unknown command {message.split()[0]}; {HELP}\n")
        elif message.strip():
            try:
                speed = chat.answer(message, write)
            except SmeltError as problem:
                write(f"{problem}; /reset starts over\n")
                continue
            write(f"\n[{speed}]\n")
