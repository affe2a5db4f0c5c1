"""A fake engine behind a real uvicorn on a loopback port."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.fake_engine import FakeEngine

from echokv.engine.tokenizer import Tokenizer
from echokv.server.app import create_app


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte_tokenizer")
    write_byte_tokenizer(path)
    return Tokenizer.from_dir(path)


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """The base URL of an application that runs in a thread."""
    config = uvicorn.Config(
        app, port=0, lifespan="off", log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture(scope="module")
def base_url(engine: FakeEngine) -> Iterator[str]:
    with served(create_app(engine, max_body_bytes=100_000)) as url:
        yield url


@pytest.fixture
def http(base_url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=base_url, timeout=10) as client:
        yield client
