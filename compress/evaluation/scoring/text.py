"""How well models predict a text, and how far a model's predictions are from the baseline's."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ....models.streaming.streamed import LOGIT_TOKENS
from ....models.text.text_source import TextSource
from ....models.text.windows import Windows, evaluation_windows
from ....system.errors import SmeltError
from ....system.progress import Progress
from ....system.storage.activation_store import ActivationStore
from ...results.result import Text
from ...results.statistics import exp, mean_interval
from .token_bytes import bytes_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NaNError(SmeltError):
    """A model computes what is no number."""


class LogitsFunction(Protocol):
    """From a model's last hidden states, ``[windows, length, width]``, to logits."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


class TextReader(Protocol):
    """A model that reads text: block by block, or with the runtime."""

    def final_hidden(self, tokens: Tensor, progress: Progress, description: str) -> ActivationStore: ...

    def head(self) -> LogitsFunction: ...


@dataclass(frozen=True)
class Excerpt:
    """Windows of a text as tokenized by one tokenizer.

    Attributes:
        source: where the text came from, as shown in reports.
        windows: token ids, and a digest that is equal for two models if they read the same tokens.
        bytes: UTF-8 bytes that each window's predicted tokens stand for.
        source_sha256: of the beginning of the text itself.
    """

    source: str
    windows: Windows
    bytes: list[int]
    source_sha256: str

    @classmethod
    def cut(
        cls,
        source: TextSource,
        tokenizer: PreTrainedTokenizerBase,
        most: int,
        length: int,
        *,
        like: Excerpt | None = None,
    ) -> Excerpt:
        """Cut the beginning of a text into windows.

        Args:
            source: the text.
            tokenizer: of the model that will read.
            most: maximum number of windows.
            length: tokens per window.
            like: windows of another tokenizer, whose stretch of text is taken.
        """
        if like is None:
            windows = evaluation_windows(source, tokenizer, most, length)
            return cls(source.label, windows, bytes_of(windows.tokens[:, 1:], tokenizer), source.beginning_digest())
        wanted, count = sum(like.bytes), most
        while True:
            windows = evaluation_windows(source, tokenizer, count, length)
            sizes = bytes_of(windows.tokens[:, 1:], tokenizer)
            if sum(sizes) >= wanted or len(windows.tokens) < count:
                break
            count *= 2
        needed = next((i for i in range(1, len(sizes)) if sum(sizes[:i]) >= wanted), len(sizes))
        return cls(source.label, windows.first(needed), sizes[:needed], like.source_sha256)

    def chosen(self, numbers: list[int]) -> Excerpt:
        """Some of its windows, in the order of the numbers."""
        sizes = [self.bytes[number] for number in numbers]
        return Excerpt(self.source, self.windows.chosen(numbers), sizes, self.source_sha256)


@dataclass
class Reading:
    """A model's last hidden states for an excerpt, kept on disk until closed."""

    excerpt: Excerpt
    store: ActivationStore
    head: LogitsFunction
    computed_by: str

    def close(self) -> None:
        """Remove the file."""
        self.store.close()


@dataclass(frozen=True)
class Divergence:
    """How far predictions are from another model's, by window.

    Attributes:
        kl: mean over a window's positions of the divergence from the baseline's distribution, in nats.
        agreement: share of its positions where both have the same top-1 token.
    """

    kl: list[float]
    agreement: list[float]

    def as_fields(self) -> dict[str, Any]:
        """As fields of the report."""
        return {
            "kl": math.fsum(self.kl) / len(self.kl),
            "kl_interval": mean_interval(self.kl),
            "top1_agreement": math.fsum(self.agreement) / len(self.agreement),
            "top1_interval": mean_interval(self.agreement),
        }


@dataclass(frozen=True)
class TextsCompared:
    """How well a baseline and a model predict the same windows, and how far apart they are.

    Attributes:
        baseline, model: their likelihoods.
        divergence: None if their vocabularies differ in size.
    """

    baseline: Text
    model: Text
    divergence: Divergence | None

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> TextsCompared:
        """From what :meth:`as_data` returned."""
        apart = data["divergence"]
        return cls(
            Text.model_validate(data["baseline"]),
            Text.model_validate(data["model"]),
            None if apart is None else Divergence(**apart),
        )

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "baseline": self.baseline.model_dump(mode="json"),
            "model": self.model.model_dump(mode="json"),
            "divergence": None if self.divergence is None else asdict(self.divergence),
        }

    def and_then(self, more: TextsCompared, excerpt: Excerpt) -> TextsCompared:
        """Together with what more windows gave.

        Args:
            more: of other windows.
            excerpt: these windows and the others.
        """
        one, other = self.divergence, more.divergence
        both = None
        if one is not None and other is not None:
            both = Divergence([*one.kl, *other.kl], [*one.agreement, *other.agreement])
        return TextsCompared(
            _text_over(excerpt, [*self.baseline.nll, *more.baseline.nll], self.baseline),
            _text_over(excerpt, [*self.model.nll, *more.model.nll], self.model),
            both,
        )

    def in_order(self, numbers: list[int], excerpt: Excerpt) -> TextsCompared:
        """The same in the text's order.

        Args:
            numbers: of the windows, as they were read; all of the text.
            excerpt: the text.
        """
        places = [place for _, place in sorted((number, place) for place, number in enumerate(numbers))]

        def ordered(values: list[float]) -> list[float]:
            return [values[place] for place in places]

        apart = self.divergence
        return TextsCompared(
            _text_over(excerpt, ordered(self.baseline.nll), self.baseline),
            _text_over(excerpt, ordered(self.model.nll), self.model),
            None if apart is None else Divergence(ordered(apart.kl), ordered(apart.agreement)),
        )

    def stopped(self, of: int) -> TextsCompared:
        """The same, saying how many windows there would have been."""
        texts = [text.model_copy(update={"of": of}) for text in (self.baseline, self.model)]
        return TextsCompared(texts[0], texts[1], self.divergence)


def read(reader: TextReader, excerpt: Excerpt, computed_by: str, name: str, progress: Progress) -> Reading:
    """Read an excerpt up to the lm_head."""
    store = reader.final_hidden(excerpt.windows.tokens, progress, f"{name} reads")
    return Reading(excerpt, store, reader.head(), computed_by)


def likelihood(reading: Reading, name: str) -> Text:
    """How well a model predicted what it read.

    Raises:
        SmeltError: it gives NaN.
    """
    sums: list[float] = []
    for part in reading.store.batches(LOGIT_TOKENS):
        sums += _nll(reading.head(reading.store.read(part)), reading.excerpt.windows.tokens[part])
    return text_result(reading.excerpt, sums, name, reading.computed_by)


def divergence(baseline: Reading, reading: Reading, names: tuple[str, str]) -> tuple[Text, Text, Divergence | None]:
    """How well two models predicted the same windows, and how far apart they are.

    Returns:
        Both likelihoods, and the divergence unless their vocabularies differ in size.

    Raises:
        SmeltError: one gives NaN.
    """
    sums: tuple[list[float], list[float]] = ([], [])
    kl: list[float] = []
    agreement: list[float] = []
    comparable = True
    for part in baseline.store.batches(LOGIT_TOKENS):
        tokens = baseline.excerpt.windows.tokens[part]
        before, after = (each.head(each.store.read(part)) for each in (baseline, reading))
        sums[0].extend(_nll(before, tokens))
        sums[1].extend(_nll(after, tokens))
        comparable = before.shape == after.shape
        if comparable:
            for p, q in zip(before[:, :-1].float(), after[:, :-1].float(), strict=True):
                agreement.append((p.argmax(-1) == q.argmax(-1)).double().mean().item())
                kl.append(_mean_divergence(p, q))
    found = Divergence(kl, agreement) if comparable else None
    texts = [
        text_result(each.excerpt, nll, name, each.computed_by)
        for each, nll, name in zip((baseline, reading), sums, names, strict=True)
    ]
    if not all(map(math.isfinite, kl)):
        raise NaNError(
            f"{names[1]}: how far its logits are from those of {names[0]} is not a number; one of them has infinite ones"
        )
    return texts[0], texts[1], found


def _text_over(excerpt: Excerpt, sums: list[float], like: Text) -> Text:
    return text_result(excerpt, sums, "a model", like.computed_by)


def _nll(logits: Tensor, tokens: Tensor) -> list[float]:
    log = logits[:, :-1].float().log_softmax(-1)
    return (-log.gather(-1, tokens[:, 1:, None]).squeeze(-1)).double().sum(dim=1).tolist()


def _mean_divergence(p: Tensor, q: Tensor) -> float:
    """Over one window's positions, one at a time, since a float64 copy would dominate memory."""
    total = 0.0
    for a, b in zip(p.log_softmax(-1), q.log_softmax(-1), strict=True):
        total += (a.exp() * (a - b)).double().sum().item()
    return total / len(p)


def text_result(excerpt: Excerpt, sums: list[float], name: str, computed_by: str) -> Text:
    """How well a model predicted an excerpt.

    Args:
        excerpt: what it read.
        sums: each window's negative log-likelihood.
        name: of the model.
        computed_by: what ran it.

    Raises:
        SmeltError: a sum is NaN or infinite.
    """
    windows, length = excerpt.windows.tokens.shape
    if not all(map(math.isfinite, sums)):
        raise NaNError(f"evaluate: {name} gives NaN on {excerpt.source}; the checkpoint or its quantization is broken")
    predicted = windows * (length - 1)
    means = mean_interval([total / (length - 1) for total in sums])
    return Text(
        source=excerpt.source,
        windows=windows,
        length=length,
        perplexity=exp(math.fsum(sums) / predicted),
        perplexity_interval=None if means is None else (exp(means[0]), exp(means[1])),
        bits_per_byte=math.fsum(sums) / math.log(2) / max(1, sum(excerpt.bytes)),
        nll=[round(total, 6) for total in sums],
        bytes=excerpt.bytes,
        text_sha256=excerpt.windows.fingerprint,
        source_sha256=excerpt.source_sha256,
        computed_by=computed_by,
    )
