"""Which of a benchmark's requests a server accepts, found by trying."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from .server_client import ServerClient, ServerProblem

# Hardly a vocabulary has fewer tokens.
_IDS = 1000
# Of one or two tokens in most vocabularies.
_WORDS = (
    "about", "again", "before", "between", "could", "day", "each", "every", "find", "first", "from", "good", "great",
    "hand", "home", "house", "just", "know", "large", "last", "life", "light", "long", "make", "many", "most", "name",
    "never", "new", "night", "old", "other", "part", "people", "place", "right", "same", "small", "some", "such", "take",
    "then", "there", "thing", "think", "three", "time", "under", "very", "want", "water", "way", "well", "what", "white",
    "word", "work", "year",
)  # fmt: skip
_TRIED_WORDS = 64
_COUNTS: tuple[Literal["parts", "whole"] | None, ...] = ("parts", "whole", None)
# A server that does not know a field or a kind of prompt may fail on it.
REFUSALS = (400, 404, 405, 415, 422, 500, 501)


@dataclass(frozen=True)
class ServerFeatures:
    """What a server's ``/v1/completions`` accepts in a stream.

    Attributes:
        token_ids: prompts of token ids.
        ignores_eos: ``ignore_eos``, so that outputs have the length that was asked for.
        counts: what it says the numbers of tokens of, by ``stream_options``: each part of a stream, or only the whole.
        tokens_per_word: of prompts that are text.
    """

    token_ids: bool
    ignores_eos: bool
    counts: Literal["parts", "whole"] | None
    tokens_per_word: float = 1.0

    @classmethod
    async def probe(cls, client: ServerClient, model: str) -> ServerFeatures:
        """Try requests, the fullest first, until the server accepts one.

        Raises:
            ServerProblem: it accepts none, or cannot be reached.
        """
        refusal: ServerProblem | None = None
        for token_ids, ignores_eos, counts in itertools.product((True, False), (True, False), _COUNTS):
            features = cls(token_ids, ignores_eos, counts)
            try:
                usage, of_parts = await features._tried(client, model)
            except ServerProblem as problem:
                if problem.status not in REFUSALS:
                    raise
                # That of the plainest request names what is wrong with all of them.
                refusal = problem
                continue
            if counts == "parts" and not of_parts:
                features = replace(features, counts="whole")  # some accept vLLM's field and do not know it
            counted = usage.get("prompt_tokens") or _TRIED_WORDS
            return features if token_ids else replace(features, tokens_per_word=counted / _TRIED_WORDS)
        assert refusal is not None
        raise refusal

    async def _tried(self, client: ServerClient, model: str) -> tuple[dict[str, Any], bool]:
        """What a short answer says of its tokens, and whether it does so with its first part."""
        body = self.body(model, self.prompt(_TRIED_WORDS), 4)
        usage: dict[str, Any] = {}
        of_parts: bool | None = None
        async for chunk in client.stream("/v1/completions", body):
            usage = chunk.get("usage") or usage
            if of_parts is None and chunk.get("choices"):
                of_parts = bool(usage.get("completion_tokens"))
        return usage, bool(of_parts)

    def prompt(self, length: int, chance: random.Random | None = None) -> list[int] | str:
        """A random prompt of so many tokens, or about so many if it is text; a new one, so that no prefix is shared, if none draws it."""
        chance = chance or random.SystemRandom()
        if self.token_ids:
            return chance.choices(range(_IDS), k=length)
        return " ".join(chance.choices(_WORDS, k=max(1, round(length / self.tokens_per_word))))

    def body(self, model: str, prompt: list[int] | str, output: int) -> bytes:
        """A request for a stream of so many tokens."""
        fields: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "stream": True,
        }
        if self.ignores_eos:
            fields["ignore_eos"] = True
        if self.counts is not None:
            # The second field is vLLM's.
            each = {"continuous_usage_stats": True} if self.counts == "parts" else {}
            fields["stream_options"] = {"include_usage": True, **each}
        return json.dumps(fields).encode()

    @property
    def notes(self) -> list[str]:
        """For each thing that it does not accept a sentence, whose subject is left out."""
        found = []
        if not self.token_ids:
            found.append("takes no prompts of token ids: they are random words, of about the length that was asked for")
        if not self.ignores_eos:
            found.append("does not take ignore_eos: outputs may end early, and what came is counted")
        if self.counts is None:
            found.append("does not say how many tokens an answer has: each part of a stream is counted as one")
        return found
