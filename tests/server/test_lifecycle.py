"""From listening to the end of the process: phases, drain, signals, failures."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.server.conftest import wait_for
from tests.server.fake_engine import FakeEngine

from echokv.engine.tokenizer import Tokenizer
from echokv.errors import CapacityError, ConfigError, EchoKVError
from echokv.server.lifecycle import serve

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine, **options: Any
) -> AsyncIterator[tuple["asyncio.Task[None]", httpx2.AsyncClient]]:
    port = free_port()
    task = asyncio.create_task(serve(engine, host="127.0.0.1", port=port, **options))
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            yield task, client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)


async def health(client: httpx2.AsyncClient) -> tuple[int, str]:
    answer = await client.get("/health")
    return answer.status_code, answer.json()["phase"]


def test_health_while_loading(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = FakeEngine(tokenizer, ready=False, load_s=60)
        async with serving(engine) as (_, client):
            assert await health(client) == (503, "loading weights")
            engine.phase = "pinning host memory"
            assert await health(client) == (503, "pinning host memory")
            answer = await client.post("/v1/completions", json={"prompt": "a"})
            assert answer.status_code == 503
            assert "pinning host memory" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert (await client.get("/v1/models")).status_code == 503
            assert (await client.get("/version")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200
            engine.loaded.set()
            await until(lambda: _is(health(client), (200, "ready")))
            assert (await client.post("/v1/completions", json={"prompt": "a"})).is_success

    asyncio.run(scenario())


async def _is(value: Awaitable[Any], expected: Any) -> bool:
    return bool(await value == expected)


@pytest.mark.parametrize("error", [CapacityError("88 GiB are needed"), RuntimeError("a bug")])
def test_a_failing_start_ends_the_server(tokenizer: Tokenizer, error: Exception) -> None:
    engine = FakeEngine(tokenizer, ready=False, start_error=error)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(serve(engine, host="127.0.0.1", port=free_port()))


def test_an_engine_that_fails_later_ends_the_server(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = FakeEngine(tokenizer, ready=False)
        async with serving(engine) as (task, client):
            await until(lambda: _is(health(client), (200, "ready")))
            engine.phase = "failed"
            assert await health(client) == (503, "failed")
            with pytest.raises(EchoKVError, match="failed while serving"):
                await asyncio.wait_for(asyncio.shield(task), 10)

    asyncio.run(scenario())


def test_a_port_in_use_is_said_before_anything_is_loaded(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, ready=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} \(--host, --port\)"):
            asyncio.run(serve(engine, host="127.0.0.1", port=port))
    assert engine.phase == "loading weights"


class Process:
    """`fake_server.py` in a process of its own, for real signals."""

    def __init__(self, *, drain_timeout_s: float, token_delay_s: float, load_s: float = 0) -> None:
        self.port = free_port()
        arguments = [self.port, drain_timeout_s, token_delay_s, load_s]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_server.py"), *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Process":
        wait_for(lambda: self.health() is not None, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def health(self) -> int | None:
        try:
            return httpx2.get(f"{self.url}/health").status_code
        except httpx2.ConnectError:
            return None

    def start_request(self, max_tokens: int) -> tuple[threading.Thread, list[httpx2.Response]]:
        answers: list[httpx2.Response] = []
        body = {"prompt": "ab", "max_tokens": max_tokens, "add_special_tokens": False}

        def send() -> None:
            answers.append(httpx2.post(f"{self.url}/v1/completions", json=body, timeout=30))

        thread = threading.Thread(target=send)
        thread.start()
        wait_for(
            lambda: (
                'num_requests_running{model_name="fake-model"} 1.0'
                in httpx2.get(f"{self.url}/metrics").text
            )
        )
        return thread, answers


def test_sigterm_lets_running_requests_finish() -> None:
    with Process(drain_timeout_s=20, token_delay_s=0.02) as server:
        thread, answers = server.start_request(60)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.health() == 503)
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "draining" in refused.json()["error"]["message"]
        thread.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["choices"][0]["text"] == "ab" * 30
        assert server.process.wait(10) == 0


def test_sigterm_ends_with_an_error_what_takes_too_long() -> None:
    with Process(drain_timeout_s=0.3, token_delay_s=0.05) as server:
        thread, answers = server.start_request(400)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status_code == 503
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 5
        assert server.process.stderr is not None
        assert "--drain-timeout" in server.process.stderr.read()


def test_sigterm_while_loading_and_twice_while_draining() -> None:
    with Process(drain_timeout_s=60, token_delay_s=0, load_s=60) as loading:
        loading.process.send_signal(signal.SIGTERM)
        assert loading.process.wait(10) == 0
    with Process(drain_timeout_s=60, token_delay_s=0.2) as draining:
        body = {"prompt": "ab", "max_tokens": 400, "stream": True}
        with (
            httpx2.Client(base_url=draining.url) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()  # kept: a lost iterator closes the connection
            next(lines)
            draining.process.send_signal(signal.SIGTERM)
            wait_for(lambda: draining.health() == 503)
            draining.process.send_signal(signal.SIGTERM)
            assert draining.process.wait(10) == -signal.SIGTERM
