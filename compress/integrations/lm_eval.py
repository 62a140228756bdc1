"""The engine as a model of lm-eval: ``lm_eval --model smelt --model_args pretrained=runs/quickstart/checkpoint``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoTokenizer

from ...models.directory.find import find_model
from ...models.text.chat_template import conversation_text
from ...runtime import Engine, EngineConfig, RuntimeProblem, SamplingParams
from ...system.errors import SmeltError
from ...system.storage.digests import digest

_LOG = logging.getLogger(__name__)

# Pairs handed to the engine at once: enough to share contexts among them, few enough to show progress.
_TOGETHER = 1024
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")

# What tasks may say of generation besides, in transformers' words.
_OTHERS = ("until", "max_gen_toks", "do_sample", "temperature", "min_new_tokens")

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


class SmeltLM(TemplateLM):
    """Scores and continues text with Smelt's engine.

    Requests are batched continuously, and a context that several requests share (a question and its answers, few-shot
    examples) is computed once. Text is tokenized as by lm-eval's own ``hf`` model.

    Args:
        pretrained: a directory, a hub name or ``builtin:smelt-6m``.
        engine: an engine to use, instead of loading ``pretrained``.
        add_bos_token: whether texts begin with the BOS token; by default as the tokenizer does.
        prefix_token_id: replaces an empty context; by default the BOS token, or else the EOS token.
        max_gen_toks: the most tokens to generate, if a task sets no limit.
        trust_remote_code: run the checkpoint's own Python.
        disable_tqdm: show no progress.
        batch_size, max_batch_size, device: lm-eval passes them; the engine batches by itself.
        options: fields of :class:`EngineConfig`: ``dtype``, ``max_model_len``, ``max_num_seqs``, ``kv_cache_dtype``, ``native`` and so on.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        engine: Engine | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        trust_remote_code: bool = False,
        disable_tqdm: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if engine is None:
            if not pretrained:
                raise RuntimeProblem("no checkpoint was named; pass --model_args pretrained=DIRECTORY")
            found = find_model(str(pretrained), trust_remote_code=trust_remote_code)
            engine = Engine(found.path, EngineConfig.of(None, {"trust_remote_code": trust_remote_code, **options}))
        if engine.tokenizer is None:
            raise RuntimeProblem(f"{pretrained or 'the checkpoint'}: has no tokenizer, which tasks of text need")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        if add_bos_token is not None:
            # A BOS token that the tokenizer's file does not add can only be requested on loading.
            self.tokenizer = AutoTokenizer.from_pretrained(
                engine.tokenizer.name_or_path, add_bos_token=add_bos_token, trust_remote_code=trust_remote_code
            )
        self._name = str(pretrained or Path(str(engine.tokenizer.name_or_path)).name)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self.max_gen_toks = max_gen_toks
        self._disable_tqdm = disable_tqdm

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context."""
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise RuntimeProblem(f"{self._name}: its tokenizer has no beginning and no end token; pass prefix_token_id")

    @property
    def max_length(self) -> int:
        """The longest input."""
        return self.engine.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the model's chat template; without its system messages, if the template takes none, as ``hf`` does."""
        try:
            return conversation_text(self.tokenizer, chat_history, continue_last=not add_generation_prompt)
        except SmeltError:
            others = [turn for turn in chat_history if turn["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            text = conversation_text(self.tokenizer, others, continue_last=not add_generation_prompt)
            _LOG.warning("the model's chat template takes no system message, so it is left out")
            return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Text to tokens."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
                add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **special).input_ids)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log probability of whole texts, in windows of the model's length."""
        windows: list[Encoded] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owner.append(i)
        sums = [0.0] * len(requests)
        for i, (logprob, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[i] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        requests: list[Encoded],  # whole texts have no pair of strings
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        # Sorted, so that requests with a common prefix meet in the engine.
        order = sorted(range(len(pairs)), key=lambda i: pairs[i])
        answers: dict[int, tuple[float, bool]] = {}
        with self._bar(len(pairs), "loglikelihood", disable_tqdm) as bar:
            for start in range(0, len(order), _TOGETHER):
                part = order[start : start + _TOGETHER]
                for i, scores in zip(part, self.engine.score([pairs[i] for i in part]), strict=True):
                    answers[i] = sum(s.logprob for s in scores), all(s.is_best for s in scores)
                    if (asked := requests[i][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", asked, answers[i])
                bar.update(len(part))
        return [answers[i] for i in range(len(pairs))]

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """A context truncated to the model's length; the continuation's last token is not part of the input."""
        if len(continuation) > self.max_length:
            raise RuntimeProblem(
                f"an answer has {len(continuation)} tokens, more than the model's {self.max_length}; remove the task"
            )
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string."""
        end = self.tokenizer.decode([self.eot_token_id]) if self.eot_token_id is not None else None
        prompts: list[tuple[list[int], SamplingParams]] = []
        seen: dict[str, int] = {}
        stops: dict[int, list[str]] = {}
        for i, request in enumerate(requests):
            text, settings = request.args  # pyright: ignore[reportAssignmentType]
            kwargs: dict[str, Any] = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
            stops[i] = handle_stop_sequences(kwargs.pop("until", None), eos=end)
            params = self._params(kwargs, stops[i])
            assert params.max_tokens is not None
            room = self.max_length - params.max_tokens
            if room < 1:
                raise RuntimeProblem(
                    f"the task generates {params.max_tokens} tokens, but the model's context length is {self.max_length};"
                    " set max_gen_toks in the task's generation_kwargs"
                )
            tokens = (self.tok_encode(text) if text else []) or [self.prefix_token_id]
            if params.temperature:
                # The same in parts, and after an interruption; repeats of an item differ.
                times = seen[text] = seen.get(text, -1) + 1
                params = replace(params, seed=int(digest([tokens, times])[:15], 16))
            prompts.append((tokens[-room:], params))
        found: dict[int, str] = {}
        with self._bar(len(requests), "generate_until", disable_tqdm) as bar, closing(self._texts(prompts)) as texts:
            for i, text in texts:
                found[i] = postprocess_generated_text(text, stops[i], None)
                self.cache_hook.add_partial("generate_until", requests[i].args, found[i])
                bar.update(1)
        return [found[i] for i in range(len(requests))]

    def _texts(self, prompts: list[tuple[list[int], SamplingParams]]) -> Generator[tuple[int, str]]:
        """Each prompt's continuation with its place, as they end."""
        waiting: dict[str, int] = {}
        # Texts are decoded alone, as ``hf`` does: some tokenizers then drop the first word's space. The engine, for which the prompt
        # is before it, would stop there.
        spaces = [[stop for stop in params.stop if stop.startswith(" ")] for _, params in prompts]
        try:
            for i, (tokens, params) in enumerate(prompts):
                stop = tuple(each for each in params.stop if each not in spaces[i])
                waiting[self.engine.add_request(tokens, replace(params, stop=stop))] = i
            while waiting:
                for output in self.engine.step():
                    i = waiting.get(output.request_id)
                    if i is None or not (output.finished or spaces[i]):
                        continue
                    if output.error is not None:
                        raise RuntimeProblem(output.error)
                    text = self.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
                    if output.finished or any(stop in text for stop in spaces[i]):
                        del waiting[output.request_id]
                        self.engine.abort(output.request_id)
                        yield i, text
        finally:
            for name in waiting:
                self.engine.abort(name)

    def _params(self, kwargs: dict[str, Any], stop: list[str]) -> SamplingParams:
        most = kwargs.pop("max_gen_toks")
        samples = kwargs.get("do_sample", False)
        temperature = float(kwargs.get("temperature", 1.0) or 0.0)
        chosen = {name: kwargs[name] for name in _SAMPLING if kwargs.get(name) is not None}
        problem = generation_problem(kwargs)
        if problem is not None:
            raise RuntimeProblem(f"the task's {problem}")
        # Stop strings are searched in text without special tokens.
        special = set(self.tokenizer.all_special_tokens)
        return SamplingParams(
            max_tokens=most,
            min_tokens=min(most, int(kwargs.get("min_new_tokens") or 0)),
            temperature=temperature if samples else 0.0,
            stop=tuple(filter(None, stop)),
            stop_token_ids=tuple(self.tokenizer.convert_tokens_to_ids(s) for s in stop if s in special),
            **chosen,
        )

    def _bar(self, total: int, description: str, disable: bool) -> tqdm:
        # None is tqdm's own choice: shown on terminals only.
        # Not the current sys.stderr, which callers may redirect to silence lm-eval.
        return tqdm(total=total, desc=description, disable=True if disable else self._disable_tqdm, file=sys.__stderr__)


def generation_problem(settings: dict[str, Any]) -> str | None:
    """Why the engine cannot generate as a task's ``generation_kwargs`` say."""
    strange = [name for name, value in settings.items() if value is not None and name not in (*_OTHERS, *_SAMPLING)]
    if not strange:
        return None
    return (
        f"generation_kwargs ask for {', '.join(strange)}, which the engine does not support; it supports"
        f" {', '.join((*_OTHERS, *_SAMPLING))}"
    )
