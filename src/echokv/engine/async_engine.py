"""The engine for asyncio callers: one thread steps it, each request is an async iterator.

The thread alone touches the `Engine`; everything else is a command in its inbox or a pure check.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from echokv.config import EngineConfig
from echokv.engine.build import NO_HOOKS, EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.outputs import RequestOutput
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats
from echokv.engine.tokenizer import Tokenizer
from echokv.errors import EchoKVError
from echokv.log import get_logger

logger = get_logger(__name__)

_IDLE_POLL_S = 0.5


class EngineDeadError(EchoKVError):
    """The engine's thread failed; requests in flight are lost and the process should restart."""


class AsyncEngine:
    """Serves requests concurrently over one `Engine`.

    Attributes:
        phase: what start-up is doing, then "ready", "draining", "stopped" or "failed".
    """

    def __init__(self, config: EngineConfig, *, hooks: EngineHooks = NO_HOOKS) -> None:
        self._config = config
        self._hooks = hooks
        self._engine: Engine | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False  # nothing reads the inbox any more
        self._gate = threading.Lock()  # between putting a command and closing
        self.phase = "starting"

    async def start(self) -> None:
        """Load everything, then begin to step.

        Raises:
            EchoKVError: the engine can't be started as configured.
        """
        self._loop = asyncio.get_running_loop()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="echokv-engine")
        self._thread.daemon = True
        self._thread.start()
        await asyncio.wrap_future(started)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self.phase == "ready"

    @property
    def engine(self) -> Engine:
        """The started engine, for its constants; its state belongs to the engine thread."""
        if self._engine is None:
            raise EngineDeadError(f"the engine is not running: {self.phase}")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        return self.engine.model_name

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and output together, of one request."""
        return self.engine.max_model_len

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs; the last one is finished.

        Leaving the iterator early, or cancelling the task that awaits it, aborts the request.

        Raises:
            RequestError: before the first output, when the request is unacceptable.
            EngineDeadError: the engine failed.
        """
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self.engine.check_request(prompt_token_ids, params)
        finished = False
        try:
            await self._call(self._add, request_id, prompt_token_ids, params, outputs)
            while not finished:
                output = await outputs.get()
                if isinstance(output, Exception):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._inbox.put(lambda: self._abort(request_id, outputs))

    async def abort(self, request_id: str) -> None:
        """Cancel a request; its iterator ends with finish_reason `abort`."""
        await self._call(lambda: self._abort(request_id, None))

    async def stats(self) -> EngineStats:
        """A snapshot between two steps."""
        stats: EngineStats = await self._call(self.engine.stats)
        return stats

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting and wait for running requests; False when the time was too short."""
        self.phase = "draining"
        deadline = time.monotonic() + timeout_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self._streams

    def stop(self) -> None:
        """End the engine thread and free the pools; requests still running end with an error."""
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.phase = "stopped" if self.phase != "failed" else self.phase

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the engine thread, between two steps."""
        future: Future[Any] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except Exception as error:
                    future.set_exception(error)

        with self._gate:
            if self._closed:
                raise EngineDeadError(f"the engine is not running: {self.phase}")
            self._inbox.put(command)
        return await asyncio.wrap_future(future)

    # Everything below runs on the engine thread.

    def _run(self, started: "Future[None]") -> None:
        try:
            self._engine = Engine(self._config, on_phase=self._set_phase, hooks=self._hooks)
        except BaseException as error:
            self.phase = "failed"
            started.set_exception(error)
            return
        self.phase = "ready"
        started.set_result(None)
        end = "the engine was stopped"
        try:
            while not self._stopping:
                self._read_inbox(wait=not self._engine.has_work)
                for output in self._engine.step():
                    self._deliver(output.request_id, output)
        except Exception as error:
            logger.exception("the engine failed")
            self.phase = "failed"
            end = f"the engine failed: {error!r}"
        with self._gate:
            self._closed = True
        self._read_inbox(wait=False)  # what came before the gate closed
        self._fail_all(EngineDeadError(end))
        self._engine.close()

    def _set_phase(self, phase: str) -> None:
        logger.info(phase)
        self.phase = phase

    def _read_inbox(self, *, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            if wait:
                self._inbox.get(timeout=_IDLE_POLL_S)()
            while True:
                self._inbox.get_nowait()()

    def _add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        outputs: "asyncio.Queue[RequestOutput | Exception]",
    ) -> None:
        assert self._engine is not None
        self._engine.add_request(request_id, prompt_token_ids, params)
        self._streams[request_id] = outputs

    def _abort(
        self, request_id: str, owner: "asyncio.Queue[RequestOutput | Exception] | None"
    ) -> None:
        """Abort a request; where an owner is given, only if the request is that owner's."""
        assert self._engine is not None
        if owner is None or self._streams.get(request_id) is owner:
            output = self._engine.abort(request_id)
            if output is not None:
                self._deliver(request_id, output)

    def _deliver(self, request_id: str, output: RequestOutput) -> None:
        stream = self._streams.pop(request_id) if output.finished else self._streams[request_id]
        self._put(stream, output)

    def _fail_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            self._put(stream, error)
        self._streams.clear()

    def _put(
        self,
        stream: "asyncio.Queue[RequestOutput | Exception]",
        output: RequestOutput | Exception,
    ) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(stream.put_nowait, output)
