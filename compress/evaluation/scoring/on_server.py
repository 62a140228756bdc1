"""A model behind a server with OpenAI's API, scored where an engine would be."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

from ....models.directory.directory import ModelDirectory
from ....models.directory.find import find_tokenizer
from ....runtime import SamplingParams
from ....runtime.measure.server_bench import ServerBench
from ....runtime.measure.server_client import ServerClient, ServerProblem
from ....runtime.measure.server_features import REFUSALS, ServerFeatures
from ....runtime.measure.server_info import ServerInfo
from ....runtime.requests.sequence import TokenScore
from ....runtime.requests.trace import Arrival
from ....system.errors import SmeltError
from ....system.progress import Progress
from ....system.storage.digests import digest
from ....system.storage.paths import named_path
from ...results.result import Sample, Text
from .samples import SAMPLE_TOKENS
from .text import Excerpt, text_result

_COMPLETIONS = "/v1/completions"
# As lm-eval does for servers that do not say it.
_LENGTH = 2048
_WINDOWS_AT_ONCE = 16
_SENTENCE = "The quick brown fox jumps over the lazy dog, and 12 others."
_DEFAULTS = SamplingParams()
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


class RemoteModel:
    """A model behind a server. It has what scoring uses of an engine.

    Args:
        url: of the server.
        model: one of its models; may be left out if there is only one.
        tokenizer: the checkpoint that it serves, as a directory or hub name, or another one with the same tokenizer; by
            default what the server says it has loaded.
        api_key: sent with each request.
        trust_remote_code: run the tokenizer's own Python.

    Attributes:
        info: what the server says of itself.
        features: what it accepts.
        name: for reports.
        directory: the tokenizer's, with the server's context length.
        tokenizer: as transformers loads it.
        max_model_len: the longest input, as an engine's.
        no_scores: why it gives no log probabilities of prompts; None if it does.
        fingerprint: of what the server says of itself, and of how it continues a sentence.
        notes: how its speed was measured otherwise than an engine's.

    Raises:
        ServerProblem: it cannot be reached, or refuses.
        SmeltError: it does not serve the model, or has another tokenizer.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        api_key: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._url, self._key = url, api_key
        self.notes: list[str] = []
        self.info, self.features = asyncio.run(self._ask(model))
        parts = urlsplit(self.info.url)
        self.name = f"{self.info.model} on {parts.netloc.rpartition('@')[2]}{parts.path}"
        directory = _tokenizers_directory(self.info, tokenizer, trust_remote_code)
        positions = directory.config_data().get("max_position_embeddings")
        longest = self.info.longest or (positions if isinstance(positions, int) else _LENGTH)
        # Every prompt is continued by one token, as servers have no other way to score it.
        self.directory = replace(directory, changes={"max_position_embeddings": longest - 1})
        # An engine's input is without the last token of what is scored, a server's prompt is with it.
        self.max_model_len = longest - 2
        self.tokenizer: Any = directory.tokenizer()
        self.no_scores, self.fingerprint = asyncio.run(self._try())

    async def _ask(self, model: str | None) -> tuple[ServerInfo, ServerFeatures]:
        async with ServerClient(self._url, self._key) as client:
            info = await ServerInfo.ask(client, model)
            return info, await ServerFeatures.probe(client, info.model)

    async def _try(self) -> tuple[str | None, str]:
        """Why it gives no log probabilities of prompts, and the fingerprint."""
        async with ServerClient(self._url, self._key) as client:
            await self._check_tokenizer(client)
            identity = [self.info.full_name, self.info.model, self.info.root, self.info.longest]
            if not self.features.token_ids:
                why = "takes no prompts of token ids"
            else:
                why = "returns no log probabilities of prompts (`echo` with `logprobs`)"
                tokens = list(self.tokenizer(_SENTENCE).input_ids)
                scores = await self._scores_of_sentence(client, tokens)
                if scores is not None:
                    # What is loaded under a name may change; a little more or less is rounding.
                    return None, digest([*identity, [round(score.logprob, 2) for score in scores]])
            plain = self._generating(_SENTENCE, SamplingParams(max_tokens=16, temperature=0))
            return why, digest([*identity, self._text_of(await client.post(_COMPLETIONS, plain))])

    async def _scores_of_sentence(self, client: ServerClient, tokens: list[int]) -> list[TokenScore] | None:
        try:
            answer = await client.post(_COMPLETIONS, self._scoring(tokens))
        except ServerProblem as problem:
            if problem.status not in REFUSALS:
                raise
            return None
        return _scores(answer, 1, len(tokens))

    async def _check_tokenizer(self, client: ServerClient) -> None:
        """Compare the tokenizer with the server's, if that can be asked."""
        own = list(self.tokenizer(_SENTENCE, add_special_tokens=False).input_ids)
        # vLLM's form and llama.cpp's.
        for body in (
            {"model": self.info.model, "prompt": _SENTENCE, "add_special_tokens": False},
            {"content": _SENTENCE, "add_special": False},
        ):
            try:
                found = await client.post("/tokenize", body)
            except ServerProblem:
                continue
            tokens = found.get("tokens") if isinstance(found, dict) else None
            if tokens == own:
                return
            if tokens:
                raise SmeltError(
                    f"{self.directory.name}: is not the tokenizer of {self.info.model} on {self.info.url}; name the"
                    " checkpoint that the server serves with --tokenizer"
                )

    # What an engine has

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[TokenScore]]:
        """Score given continuations.

        Args:
            pairs: a context and its continuation, as token ids; neither may be empty.

        Returns:
            For each pair, the log probabilities of its continuation's tokens, and whether each was the most likely token.

        Raises:
            ServerProblem: the server refused a request or failed on it.
        """
        answers = self._answers([self._scoring([*context, *continuation]) for context, continuation in pairs])
        found = []
        for answer, (context, continuation) in zip(answers, pairs, strict=True):
            scores = _scores(answer, len(context), len(context) + len(continuation))
            if scores is None:
                raise ServerProblem(
                    f"{self.info.url}: returned no log probabilities of a prompt, although it did so before; its log may say why"
                )
            found.append(scores)
        return found

    def complete(self, prompts: Sequence[tuple[list[int] | str, SamplingParams]]) -> list[str]:
        """Continuations of prompts.

        Args:
            prompts: token ids or texts, each with its parameters.

        Raises:
            ServerProblem: the server refused a request or failed on it.
        """
        answers = self._answers([self._generating(prompt, params) for prompt, params in prompts])
        return [self._text_of(answer) for answer in answers]

    def continuations(self, beginnings: list[str]) -> list[Sample]:
        """Each text and its greedy continuation."""
        params = SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=0)
        texts = self.complete([(beginning, params) for beginning in beginnings])
        return [Sample(prompt=beginning, text=text) for beginning, text in zip(beginnings, texts, strict=True)]

    def likelihood(self, excerpt: Excerpt, progress: Progress) -> Text:
        """How well it predicts a text.

        Raises:
            ServerProblem: the server refused a request or failed on it.
        """
        windows: list[list[int]] = excerpt.windows.tokens.tolist()
        starts = range(0, len(windows), _WINDOWS_AT_ONCE)
        sums = [
            -math.fsum(score.logprob for score in scores)
            for start in progress.track(starts, f"{self.name} reads")
            for scores in self.score([(each[:1], each[1:]) for each in windows[start : start + _WINDOWS_AT_ONCE]])
        ]
        return text_result(excerpt, sums, self.name, self.info.full_name)

    @contextmanager
    def worker(self, concurrency: int) -> Iterator[RemoteWorker]:
        """What lets a measurement of speed put its loads on the server."""
        with ServerBench(self._url, self.info.model, self._key, connections=concurrency) as bench:
            yield RemoteWorker(self.name, bench)
            self.notes = [f"{self.name} {note}" for note in bench.notes]

    # Requests

    def _answers(self, bodies: list[dict[str, Any]]) -> list[Any]:
        async def ask() -> list[Any]:
            async with ServerClient(self._url, self._key) as client:
                return await client.post_all(_COMPLETIONS, bodies)

        return asyncio.run(ask())

    def _scoring(self, tokens: list[int]) -> dict[str, Any]:
        return {
            "model": self.info.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
        }

    def _generating(self, prompt: list[int] | str, params: SamplingParams) -> dict[str, Any]:
        if not isinstance(prompt, str) and not self.features.token_ids:
            prompt = self.tokenizer.decode(prompt, skip_special_tokens=True)
        # Special tokens are no part of an answer's text, and the end token ends it anyway.
        special = set(self.tokenizer.all_special_tokens)
        fields: dict[str, Any] = {
            "stop": [text for text in params.stop if text not in special],
            "stop_token_ids": [token for token in params.stop_token_ids if token != self.tokenizer.eos_token_id],
            **{name: value for name in _SAMPLING if (value := getattr(params, name)) != getattr(_DEFAULTS, name)},
        }
        return {
            "model": self.info.model,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            **{name: value for name, value in fields.items() if value != []},
        }

    def _text_of(self, answer: Any) -> str:
        try:
            return str(answer["choices"][0]["text"])
        except (KeyError, IndexError, TypeError):
            raise ServerProblem(
                f"{self.info.url}{_COMPLETIONS}: answered without a text; give the address of a server with OpenAI's API"
            ) from None


class RemoteWorker:
    """Puts the loads of a speed measurement on a server, as :class:`.workers.Worker` does on an engine.

    Args:
        name: of the model, for messages.
        bench: of the server.
    """

    def __init__(self, name: str, bench: ServerBench) -> None:
        self._name, self._bench = name, bench

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        """Put a load on it, after a short one.

        Raises:
            ServerProblem: the server refused a request or failed on it.
            SmeltError: the time between tokens cannot be seen.
        """
        assert do == "load_of", "a server can do nothing else"
        prompt, generate, at_once = (command[name] for name in ("prompt", "generate", "concurrency"))
        self._bench.run_load("", [Arrival(0, min(prompt, 32), min(generate, 4))], 1)
        found = self._bench.run_load("", [Arrival(0, prompt, generate)] * at_once, at_once)
        if found.decode_rate is None:
            raise SmeltError(
                f"speed of {self._name}: the tokens of its answers come all at once, or are single ones; generate more of them,"
                " or pass --speed none"
            )
        return asdict(found)


def _tokenizers_directory(info: ServerInfo, given: str | None, trust_remote_code: bool) -> ModelDirectory:
    # vLLM says what it has loaded; others say names of their own.
    candidates = [name for name in (info.root, info.model) if name and _may_be_checkpoint(name)]
    name = given or next(iter(candidates), None)
    if name is None:
        raise SmeltError(
            f"{info.url}: does not say what {info.model} was loaded from; name that checkpoint, or another one with its"
            " tokenizer, with --tokenizer"
        )
    return find_tokenizer(name, trust_remote_code=trust_remote_code)


def _may_be_checkpoint(name: str) -> bool:
    return named_path(name).is_dir() or name.count("/") == 1


def _scores(answer: Any, start: int, stop: int) -> list[TokenScore] | None:
    """The scores of a prompt's tokens, of which there are ``stop``; None if the answer does not have them."""
    try:
        logprobs = answer["choices"][0]["logprobs"]
        own, best = logprobs["token_logprobs"], logprobs["top_logprobs"]
        if not len(own) == len(best) == stop + 1:
            return None
        return [
            TokenScore(float(mine), mine >= max(top.values()))
            for mine, top in zip(own[start:stop], best[start:stop], strict=True)
        ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
