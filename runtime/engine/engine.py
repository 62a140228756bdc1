"""The engine: a loaded checkpoint, and what can be asked of it."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from ...models.directory.find import find_checkpoint
from ...models.text.chat_template import conversation_tokens
from ...system.errors import RuntimeProblem
from ...system.hardware.primitive_caches import limit_primitive_caches
from ...system.progress import Log
from ..blocks.block_cache import BlockCache
from ..decoder.model import Model
from ..decoder.prompt_states import prompt_states
from ..parallel.stages import RankPlace
from ..requests.options import RequestOptions
from ..requests.output import RequestOutput
from ..requests.params import SamplingParams
from ..requests.sequence import Request, TokenScore
from ..scheduling.scheduler import Scheduler
from ..speculation.drafter import Drafter
from ..speculation.fixed_length import FixedDrafts
from ..speculation.lookup import LookupDrafter
from ..speculation.lookup_first import LookupFirst
from ..weights.live_weights import LiveWeights
from .adapters import EngineAdapters
from .core import EngineCore, Sink
from .embedding import Pooling, embedding
from .engine_thread import EngineThread
from .executors.draft_lengths import drafting_of
from .executors.executor import Executor
from .executors.executors import executor_of
from .explain import explain
from .loop import EngineLoop, Stream
from .new_requests import NewRequests, Prompt
from .ranks.share import EngineShare
from .ranks.worker import work_unless_first
from .ranks.workers import StatesMessage, Workers
from .scoring import grouped
from .setup.config import EngineConfig
from .setup.loading import on_device_of
from .setup.parts import EngineParts
from .setup.scheduler import scheduler_of


class QueueFull(RuntimeProblem):
    """As many requests are waiting as ``max_waiting`` allows."""


class Engine:
    """Loads a checkpoint and generates from prompts with continuous batching.

    Args:
        checkpoint: a directory: Smelt's, a run's output, or any in compressed-tensors, GPTQ, AWQ or plain weights; a hub name, or
            ``builtin:smelt-6m``.
        config: the options; the defaults if None.
        thread: that steps it for asyncio tasks; one of its own if None.
        options: fields of :class:`EngineConfig` by their names, which override those of ``config``.

    Attributes:
        config: the options.
        core: its requests, and the steps that compute them.
        loop: runs its requests for asyncio tasks.
        cost: of a token.
        drafter: that proposes tokens; None if there is none.

    Raises:
        SmeltError: the checkpoint cannot be read; a RuntimeProblem if it cannot be served or does not fit in memory.
        TypeError: one of ``options`` is not a field of the configuration.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        config: EngineConfig | None = None,
        *,
        thread: EngineThread | None = None,
        **options: Any,
    ) -> None:
        self.config = config = EngineConfig.of(config, options)
        limit_primitive_caches()
        self._log: Log = (lambda _: None) if config.quiet else _print_notice
        self._workers: Workers | None = None
        checkpoint = _found(checkpoint, trust_remote_code=config.trust_remote_code)
        if config.ranks > 1:
            work_unless_first(config)
            self._workers, self.config = Workers.of(checkpoint, config)
            config = self.config
            self._end_workers = weakref.finalize(self, self._workers.close)
        with nullcontext() if self._workers is None else self._workers.watched():
            self._load(checkpoint, config, thread)

    def _load(self, checkpoint: Path, config: EngineConfig, thread: EngineThread | None) -> None:
        place = RankPlace() if self._workers is None else self._workers.place
        share = EngineShare.load(checkpoint, config, place, log=self._log)
        self.model, self.max_model_len, self.reservation = share.model, share.max_model_len, share.reservation
        self._store, self._host, self.cost = share.store, share.host, share.cost
        self._device = on_device_of(share.model)
        directory = share.opened.directory
        self.tokenizer: Any = directory.tokenizer() if directory.has_tokenizer else None
        self.ends = frozenset(directory.end_tokens(share.opened.config))
        self._draft_model = share.draft_model
        self.drafter = self._drafter()
        scheduler = scheduler_of(config, self.reservation.blocks, self._host)
        executor = executor_of(self._parts(), self.drafter, self._workers)
        scheduler.drafting = drafting = None if self.drafter is None else drafting_of(config, self.drafter, executor)
        scheduler.most_verified = executor.most_verified
        scheduler.same_rows = share.model.operators.same_rows
        workers = self._workers
        self.core = EngineCore(
            scheduler,
            executor,
            drafting,
            ends=self.ends,
            tokenizer=self.tokenizer,
            problem=lambda: None if workers is None else workers.problem,
        )
        self._new = NewRequests(self, config.seed)
        drafts_itself = share.draft_model is not None and share.draft_model.is_part
        refused = f"drafter is {config.drafter}, whose layers an adapter would change for drafts, too; use another drafter, or merge the adapter with smelt merge"
        self._adapters = EngineAdapters(
            self.model, self.core, self.reservation.adapters, refused if drafts_itself else None
        )
        self.loop = EngineLoop(self, thread or EngineThread())

    def _drafter(self) -> Drafter | None:
        lookup = LookupDrafter() if self.config.looks_up else None
        if self._draft_model is None:
            return lookup
        weights = self._draft_model.drafter(self._parts())
        return weights if lookup is None else LookupFirst(lookup, weights)

    def _parts(self) -> EngineParts:
        blocks = self.reservation.blocks
        divided = None if self._workers is None else partial(self._workers.compute_runs, drafts=True)
        return EngineParts(
            self.model, self._store, blocks, self.ends, self.config, self.max_model_len, self._host, self._log, divided
        )

    def take_weights(self, config: Any, names: Iterable[str], load: Callable[[str], Tensor]) -> None:
        """Load other weights of the same shapes, such as those of a model in training.

        They are packed again; the checkpoint's files are not touched. The prefix cache is cleared, and adapters are unloaded.

        Args:
            config: the model's Hugging Face configuration, which may differ only by an untied lm_head.
            names: of all tensors, as in an unquantized checkpoint of the model.
            load: returns a tensor by name; it is copied.

        Raises:
            RuntimeProblem: requests are running, or a weight is missing.
        """
        if self._workers is not None:
            raise RuntimeProblem("weights cannot be taken from memory on several ranks; use an engine on one process")
        if self.config.offload is not None:
            raise RuntimeProblem("weights cannot be taken from memory if they are offloaded; leave offload out")
        if self._draft_model is not None:
            raise RuntimeProblem("weights cannot be taken from memory beside a model that drafts; leave drafter out")
        with self.core.lock:
            if self.core.requests:
                raise RuntimeProblem(
                    f"{len(self.core.requests)} requests are running; weights change only between requests"
                )
            live = LiveWeights(config, self.model.dtype, names, load)
            self.model = Model(live, self.model.operators)
            self._adapters.forget(self.model)
            self.cache.forget()
            self.core.executor = executor_of(self._parts(), self.drafter, self._workers)

    @property
    def scheduler(self) -> Scheduler:
        """Which requests run, and which wait."""
        return self.core.scheduler

    @property
    def cache(self) -> BlockCache:
        """The blocks of the KV cache."""
        return self.core.scheduler.cache

    @property
    def executor(self) -> Executor:
        """What computes steps."""
        return self.core.executor

    @property
    def drafting(self) -> FixedDrafts | None:
        """How many tokens are drafted, and what became of them (``total``); None without a drafter."""
        return self.core.drafting

    def offload_sentence(self) -> str | None:
        """What reading offloaded weights has taken so far; None if they are in memory."""
        stream = self.model.stream
        return None if stream is None else stream.counts.sentence(stream.predicted)

    @property
    def problem(self) -> str | None:
        """Why no request can be served any more; None if it can."""
        return None if self._workers is None else self._workers.problem

    def close(self) -> None:
        """Step it no more, and end the processes that it has started. Its requests must have ended."""
        self.loop.close()
        if self._workers is not None:
            self._workers.close()

    @property
    def adapters(self) -> list[str]:
        """The names of the LoRA adapters that are loaded."""
        return self._adapters.names

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter beside the model; requests name it with ``adapter``.

        Args:
            name: of its own.
            directory: where `peft` saved it.

        Raises:
            SmeltError: it is not an adapter, is of another model or kind, does not fit in memory, or the name is taken.
        """
        self._adapters.load(name, Path(directory))

    def unload_adapter(self, name: str) -> None:
        """Drop a LoRA adapter.

        Raises:
            RuntimeProblem: there is none of that name, or requests for it are not finished.
        """
        self._adapters.unload(name)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Generate from prompts and return when all are done.

        Args:
            prompts: one or many; a text, or token ids.
            params: one for all prompts, or one for each.
            options: of each; see :class:`.RequestOptions`.

        Returns:
            One output per prompt, in order.

        Raises:
            RuntimeProblem: a prompt or its parameters cannot be served; nothing was started.
        """
        if isinstance(params, dict) or isinstance(prompts, dict):
            raise RuntimeProblem(
                "generate takes texts or token ids, and SamplingParams; write SamplingParams(max_tokens=…)"
            )
        many = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        each = (
            [params or SamplingParams()] * len(many) if params is None or isinstance(params, SamplingParams) else params
        )
        if len(each) != len(many):
            raise RuntimeProblem(
                f"{len(many)} prompts but {len(each)} parameters were given; give one for each, or one for all"
            )
        return self._finish([self._request(prompt, p, None, options) for prompt, p in zip(many, each, strict=True)])  # type: ignore[arg-type]

    def chat(
        self,
        messages: SequenceOf[dict[str, Any]] | SequenceOf[SequenceOf[dict[str, Any]]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        tools: SequenceOf[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Answer conversations, written in the model's chat template.

        Args:
            messages: of one conversation, or of several.
            params: one for all conversations, or one for each.
            tools: that the model may call, in OpenAI's form.
            chat_template_kwargs: further variables of the template.
            options: of each; see :class:`.RequestOptions`.

        Raises:
            SmeltError: there is no template, or it refuses a conversation, or parameters cannot be served; nothing was started.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise RuntimeProblem("the checkpoint has no chat template; write conversations as texts, and generate")
        assert self.tokenizer is not None
        many = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            conversation_tokens(self.tokenizer, each, tools=tools, template=chat_template_kwargs)  # type: ignore[arg-type]
            for each in many
        ]
        return self.generate(prompts, params, **options)

    def score(self, pairs: SequenceOf[tuple[SequenceOf[int], SequenceOf[int]]]) -> list[list[TokenScore]]:
        """Score given continuations. A context that several pairs share is computed once.

        Args:
            pairs: a context and its continuation, as token ids; neither may be empty.

        Returns:
            For each pair, the log probabilities of its continuation's tokens, and whether each was the most likely token.

        Raises:
            RuntimeProblem: a pair cannot be scored (nothing was started), or the model's logits are NaN or infinite.
        """
        groups = grouped(pairs, self.scheduler.max_num_seqs)
        outputs = self._finish([self._new.of_scoring(group.context, group.continuations) for group in groups])
        found: dict[int, list[TokenScore]] = {}
        for group, output in zip(groups, outputs, strict=True):
            if output.error is not None or output.scores is None:
                raise RuntimeProblem(output.error or "scoring was aborted")
            found |= {i: scores for places, scores in zip(group.places, output.scores, strict=True) for i in places}
        return [found[i] for i in range(len(pairs))]

    def _finish(self, requests: list[Request]) -> list[RequestOutput]:
        """Run requests until they finish."""
        done: dict[str, RequestOutput] = {}

        def sink(output: RequestOutput) -> None:
            if output.finished:
                done[output.request_id] = output

        names = [request.id for request in requests]
        try:
            with self.core.lock:
                for request in requests:
                    self._submit(request, sink)
            while len(done) < len(requests):
                self.advance()
        finally:
            for name in names:
                self.abort(name)
        return [done[name] for name in names]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Generate from a prompt and yield its state whenever it has grown. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`add_request`.
        """
        stream = self.start(prompt, params, id=id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def start(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        joins: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queue a prompt for the engine's own thread, without waiting for the step that runs. Called in an asyncio loop.

        Args:
            joins: it belongs to a prompt that was queued just before, and is not kept out by ``max_waiting``.

        Other arguments, and errors, are those of :meth:`add_request`.
        """
        request = self._request(prompt, params or SamplingParams(), id, options)
        request.arrived = time.perf_counter()
        if not joins:
            self._check_queue(self.loop.arriving)
        return self.loop.submit(request)

    async def embed(self, tokens: list[int], *, pooling: Pooling = "last", adapter: str | None = None) -> Tensor:
        """A prompt's embedding: its hidden states pooled, of length 1. Pieces of long prompts are computed between steps; on several ranks
        all of a prompt is.

        Args:
            tokens: of the prompt.
            pooling: ``last`` for the last token's state, or ``mean``.
            adapter: the LoRA adapter that changes the model for it; None for none.

        Raises:
            RuntimeProblem: the prompt is empty, too long, or has tokens outside the vocabulary.
        """
        self._check_prompt(tokens)
        pieces = embedding(self._states([tokens], self.config.max_num_batched_tokens, adapter), pooling)
        while True:
            found = await self.loop.result(lambda: next(pieces))
            if found is not None:
                return found

    def _check_prompt(self, tokens: list[int]) -> None:
        problem = self._new.token_problem(tokens, "prompt")
        if problem is None and len(tokens) > self.max_model_len:
            problem = (
                f"the prompt has {len(tokens)} tokens, more than the engine's max_model_len of {self.max_model_len}"
            )
        if problem:
            raise RuntimeProblem(problem)

    def hidden_states(self, prompts: list[list[int]]) -> Tensor:
        """What the lm_head multiplies, for every token of some prompts, ``[prompts, tokens, width]``; beside the engine's requests.

        Args:
            prompts: of one length, as token ids; their keys and values get a cache of their own.

        Raises:
            RuntimeProblem: there is none, one is empty, too long, or has tokens outside the vocabulary, or lengths differ.
        """
        if not prompts or any(len(prompt) != len(prompts[0]) for prompt in prompts):
            raise RuntimeProblem(
                "hidden states are of prompts of one length; give at least one, and others by themselves"
            )
        for prompt in prompts:
            self._check_prompt(prompt)
        with self.core.lock:
            (found,) = self._states(prompts, len(prompts[0]))
        return found

    def _states(self, prompts: list[list[int]], budget: int, adapter: str | None = None) -> Iterator[Tensor]:
        if self._workers is None:
            pieces = prompt_states(self.model, prompts, budget=budget, adapter=adapter)
            while True:
                with self._device:
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        # All pieces at once, as the other ranks have one cache for them.
        with self._workers.watched(), self._device:
            self._workers.compute(StatesMessage(prompts, budget))
            found = list(prompt_states(self.model, prompts, budget=budget))
        yield from found

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request that was checked; ``sink`` gets its outputs."""
        with self.core.lock:
            self._submit(request, sink)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queue a prompt; :meth:`step` continues it.

        Args:
            prompt: a text, or token ids.
            params: the sampling parameters.
            id: its id, by default a new one.
            options: see :class:`.RequestOptions`.

        Returns:
            The request's id.

        Raises:
            QueueFull: ``max_waiting`` requests are waiting.
            RuntimeProblem: the prompt or its parameters cannot be served.
        """
        request = self._request(prompt, params or SamplingParams(), id, options)
        with self.core.lock:
            self._check_queue()
            self._submit(request, None)
        return request.id

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the state of every request that progressed.

        An interrupt is raised when the step is complete, so that the engine can go on; the next call returns its outputs, too.
        """
        return self.core.step()

    def advance(self) -> None:
        """Compute one step for :meth:`generate` and streams; what it computes of other requests, the next :meth:`step` returns."""
        self.core.advance()

    def abort(self, id: str) -> None:
        """Abort a request; a no-op if it has finished."""
        self.core.abort(id)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished, or has outputs that :meth:`step` has not returned."""
        return self.core.has_work

    def is_running(self, id: str) -> bool:
        """Whether a request is known and not finished."""
        return id in self.core.requests

    def explain(self) -> dict[str, str]:
        """The kernel of each linear, by role; layers with the same one share an entry."""
        return explain(self.model)

    def _request(self, prompt: Prompt, params: SamplingParams, id: str | None, options: RequestOptions) -> Request:
        """A checked request, not queued yet."""
        salt = self._adapters.salt(options.get("adapter"))
        return self._new.of_prompt(prompt, params, id, options, salt=salt)

    def _check_queue(self, arriving: int = 0) -> None:
        most, waiting = self.config.max_waiting, len(self.scheduler.waiting) + arriving
        if most is not None and waiting >= most:
            raise QueueFull(f"{waiting} requests are waiting already, as many as max_waiting allows; try again later")

    def _submit(self, request: Request, sink: Sink | None) -> None:
        self._adapters.check(request)
        at = self.config.upper_bits_at
        scores = any(sequence.expected for sequence in request.sequences)
        if at is not None and request.adapter is None and not scores and len(self.scheduler.waiting) >= at:
            # Its keys and values are not those of others with the same beginning.
            request.upper_bits, request.salt = True, request.salt + b" upper bits"
        self.core.submit(request, sink)


def _found(checkpoint: str | Path, *, trust_remote_code: bool) -> Path:
    place = Path(checkpoint)
    if (place / "config.json").exists():
        return place
    return find_checkpoint(str(checkpoint), trust_remote_code=trust_remote_code).path


def _print_notice(text: str) -> None:
    print(f"smelt: {text}", file=sys.stderr)
