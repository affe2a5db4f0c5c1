"""`echokv serve`: what it prints, and the whole command as a process of its own."""

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.cli.conftest import SMALL_ENGINE

from echokv.cli.main import build_parser
from echokv.cli.serve import curl_line

START_S = 120


def line(*argv: str) -> list[str]:
    args = build_parser().parse_args(["serve", "dir", *argv])
    return shlex.split(curl_line(args, args.port, "it's"))


def test_the_curl_line_is_a_request_to_this_server() -> None:
    words = line("--port", "8123")
    assert words[:2] == ["curl", "http://127.0.0.1:8123/v1/completions"]
    assert json.loads(words[-1])["model"] == "it's"


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("example", "example")],
)
def test_the_curl_line_names_a_host_that_can_be_asked(host: str, shown: str) -> None:
    assert line("--host", host)[1] == f"http://{shown}:8000/v1/completions"


def test_the_curl_line_does_not_show_the_api_key() -> None:
    words = line("--api-key", "secret")
    assert "Authorization: Bearer $API_KEY" in words
    assert not any("secret" in word for word in words)


class Process:
    """A running `echokv serve` on a free port; its output is read as it comes."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "echokv.cli.main", "serve", str(model), "--port", "0",
             *SMALL_ENGINE],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(text)
            if "curl " in text:
                self.ready.set()
        self.ready.set()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        assert self.ready.wait(START_S), self.output
        found = re.search(r"listening on (http://\S+)", self.output)
        assert found, self.output
        return found[1]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self._reader.join(10)
        return status


@pytest.fixture
def server(demo_model: Path) -> Iterator[Process]:
    running = Process(demo_model)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait(10)


def test_the_command_serves_and_ends_on_sigterm(server: Process, demo_model: Path) -> None:
    url = server.url()
    assert "Byte budget" in server.output
    assert "256 rows a layer are kept on the device" in server.output
    body = {"model": demo_model.name, "prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert server.end() == 0
    assert "Traceback" not in server.output
