"""Serves an engine over real HTTP from a thread of the test process."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from echokv.engine.async_engine import AsyncEngine
from echokv.server.lifecycle import serve

START_TIMEOUT_S = 60


@contextmanager
def served(engine: AsyncEngine, **options: Any) -> Iterator[str]:
    """Serve until the block ends; yields the base URL. The engine must survive the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ready: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def main() -> None:
        task = asyncio.create_task(serve(engine, host="127.0.0.1", port=port, **options))
        ready.append((asyncio.get_running_loop(), task))
        await asyncio.gather(task, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not engine.is_ready:
            assert thread.is_alive() and time.monotonic() < deadline, engine.phase
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
        assert engine.is_ready, "the engine died"
    finally:
        if ready and thread.is_alive():
            loop, task = ready[0]
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
