"""The prompts of one HTTP request while the engine works on them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from ...engine.loop import Stream
from ...requests.options import RequestOptions
from ...requests.output import RequestOutput
from ...requests.params import SamplingParams
from ..http.errors import ApiError, sentence
from .served_model import ServedModel

# OpenAI's and Anthropic's clients would send it again, twice.
_NO_RETRY = {"x-should-retry": "false"}


class Running:
    """One or more prompts with the same parameters. All are aborted when the block that it manages ends.

    Args:
        model: that continues them.
        prompts: their tokens.
        params: for each.
        name: of the request.
        options: of the engine's, for each.

    Attributes:
        latest: the last output of each prompt.

    Raises:
        ApiError: one of them cannot be served; none runs.
    """

    def __init__(
        self,
        model: ServedModel,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        name: str,
        options: RequestOptions,
    ) -> None:
        self.latest: list[RequestOutput | None] = [None] * len(prompts)
        self._model = model
        self._streams: list[Stream] = []
        self._aborted: ApiError | None = None
        model.running.add(self)
        # Clients may send the same id twice.
        own = f"{name}-{uuid.uuid4().hex}"
        watches = [observer.watch(name, prompts, params) for observer in model.observers]
        try:
            for number, prompt in enumerate(prompts):
                self._streams.append(model.start(prompt, params, f"{own}-{number}", options, joins=number > 0))
        except BaseException:
            self.close()
            raise
        for number, stream in enumerate(self._streams):
            stream.watchers = [each[number] for each in watches]
            stream.interval = model.options.stream_interval

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def abort(self, why: ApiError) -> None:
        """Abort those that have not ended; the request is answered with an error."""
        self._aborted = why
        self.close()

    def close(self) -> None:
        """Abort those that have not ended."""
        for stream in self._streams:
            stream.close()
        self._model.running.discard(self)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Each prompt's outputs with its number, as they come.

        Raises:
            ApiError: the engine failed on one.
        """
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, self._kept(0, output)
            return
        waiting = {asyncio.ensure_future(_next(stream)): number for number, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number, output = waiting.pop(task), task.result()
                    self._kept(number, output)
                    if not output.finished:
                        waiting[asyncio.ensure_future(_next(self._streams[number]))] = number
                    yield number, output
        finally:
            for task in waiting:
                task.cancel()

    def _kept(self, number: int, output: RequestOutput) -> RequestOutput:
        if output.error is not None and output.is_invalid:
            raise ApiError(400, sentence(RuntimeError(output.error)))
        if output.error is not None:
            raise ApiError(500, sentence(RuntimeError(output.error)), "server_error")
        if any(completion.finish_reason == "deadline" for completion in output.outputs):
            raise ApiError(
                408, "The request's deadline passed before it was finished.", "timeout_error", "deadline_exceeded",
                headers=_NO_RETRY,
            )  # fmt: skip
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            raise self._aborted or ApiError(503, "The request was aborted by the server.", "service_unavailable_error")
        self.latest[number] = output
        return output

    async def finished(self) -> list[RequestOutput]:
        """The last output of each prompt.

        Raises:
            ApiError: the engine failed on one.
        """
        async with asyncio.TaskGroup() as together:
            tasks = [together.create_task(stream.last()) for stream in self._streams]
        return [self._kept(number, task.result()) for number, task in enumerate(tasks)]

    @property
    def known(self) -> list[RequestOutput]:
        """The latest output of each prompt that has one."""
        return [output for output in self.latest if output is not None]


async def _next(stream: Stream) -> RequestOutput:
    return await stream.__anext__()
