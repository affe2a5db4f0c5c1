"""The server process: listen at once, load, serve, drain on SIGTERM, end.

Knows uvicorn and signals; the application is `app`'s, what to serve is the caller's.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from echokv.errors import ConfigError, EchoKVError
from echokv.log import get_logger
from echokv.server.app import DEFAULT_MAX_BODY_BYTES, create_app
from echokv.server.serving_engine import ServingEngine
from echokv.server.state import ServerState

logger = get_logger(__name__)

_FLUSH_TIMEOUT_S = 5  # for responses on their way out once the engine has stopped
_KEEP_ALIVE_S = 75  # longer than proxies keep idle connections, so that they close first
_CHECK_INTERVAL_S = 0.5


class Server(uvicorn.Server):
    """A uvicorn server that drains before it closes.

    The first SIGTERM or SIGINT turns new requests away with 503 and lets running ones finish;
    a second one ends the process at once.
    """

    def __init__(
        self, config: uvicorn.Config, state: ServerState, *, drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._state = state
        self._drain_timeout_s = drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to end."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)
        if self._draining is not None and not self.force_exit:
            await self._draining

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler: drain, or give up draining."""
        if self._state.is_draining or self._loop is None:
            super().handle_exit(sig, frame)
            self.force_exit = True
            return
        self._state.is_draining = True
        self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Accept nothing new; end once nothing runs or the time is up."""
        self._state.is_draining = True
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        engine = self._state.engine
        try:
            if engine.is_ready:
                logger.info("draining: at most %g s", self._drain_timeout_s)
                if not await engine.drain(self._drain_timeout_s):
                    logger.warning(
                        "requests still run after %g s (--drain-timeout): they end with an error",
                        self._drain_timeout_s,
                    )
                await asyncio.to_thread(engine.stop)
        finally:
            self.should_exit = True


async def serve(
    engine: ServingEngine,
    *,
    host: str,
    port: int,
    api_key: str | None = None,
    drain_timeout_s: float = 60.0,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    on_ready: Callable[[int], None] = lambda _: None,
) -> None:
    """Listen, start the engine meanwhile, serve until SIGTERM or SIGINT, then drain and return.

    Args:
        engine: not started yet; stopped when this returns.
        host: address to listen on.
        port: TCP port; 0 takes a free one (logged).
        api_key: what clients must send; None lets everyone in.
        drain_timeout_s: seconds that running requests get after the signal.
        max_body_bytes: larger request bodies are refused.
        on_ready: called with the port once requests are accepted.

    Raises:
        ConfigError: host and port can't be listened on.
        EchoKVError: the engine couldn't start, or failed while serving.
    """
    listener = _listen(host, port)
    app = create_app(engine, api_key=api_key, max_body_bytes=max_body_bytes)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_TIMEOUT_S,
    )
    server = Server(config, app.state.server, drain_timeout_s=drain_timeout_s)
    port = listener.getsockname()[1]
    logger.info("listening on http://%s:%d", host, port)
    serving = asyncio.create_task(server.serve([listener]))
    watching = asyncio.create_task(_start_and_watch(engine, lambda: on_ready(port)))
    try:
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, EchoKVError):
            await watching
        if engine.is_ready:
            await asyncio.to_thread(engine.stop)
        listener.close()


async def _start_and_watch(engine: ServingEngine, on_ready: Callable[[], None]) -> None:
    """Start the engine, then return only by raising: when it has failed."""
    await engine.start()
    on_ready()
    while engine.phase != "failed":
        await asyncio.sleep(_CHECK_INTERVAL_S)
    raise EchoKVError("the engine failed while serving: the log above has the cause")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host} port {port} (--host, --port): {error.strerror}"
        ) from error
