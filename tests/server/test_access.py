"""The API key guards everything but /health, /version and /metrics."""

from collections.abc import Iterator

import httpx2
import pytest
from openai import AuthenticationError, OpenAI
from tests.server.conftest import served
from tests.server.fake_engine import FakeEngine

from echokv.engine.tokenizer import Tokenizer
from echokv.server.app import create_app

KEY = "s3crét"


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[str]:
    with served(create_app(FakeEngine(tokenizer), api_key=KEY)) as url:
        yield url


def test_official_client(guarded: str) -> None:
    with OpenAI(base_url=f"{guarded}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(AuthenticationError):
            client.completions.create(model="fake-model", prompt="a")
        with pytest.raises(AuthenticationError):
            client.models.list()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        (b"", 401),
        (b"Bearer", 401),
        (b"Bearer wrong", 401),
        (KEY.encode(), 401),
        (b"Basic " + KEY.encode(), 401),
        (b"Bearer " + KEY.encode() + b"x", 401),
        (b"Bearer \xff\x80", 401),
        (b"Bearer " + KEY.encode(), 200),
        (b"bearer  " + KEY.encode(), 200),
    ],
)
def test_header(guarded: str, header: bytes | None, status: int) -> None:
    headers = [] if header is None else [(b"Authorization", header)]
    with httpx2.Client(base_url=guarded) as client:
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_the_body_is_not_even_read(guarded: str, path: str) -> None:
    assert httpx2.post(guarded + path, content=b"{").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
def test_what_stays_open(guarded: str, path: str) -> None:
    assert httpx2.get(guarded + path).status_code == 200
