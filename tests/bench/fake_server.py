"""A small OpenAI-like server in a thread: streams as many chunks as it is asked for."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

FIRST_CHUNK_S = 0.02
NEXT_CHUNK_S = 0.01


class FakeServer:
    """Counts what it sees; token id 13 in a prompt makes it refuse, 14 break off, 15 hide usage."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.bodies: list[dict[str, Any]] = []
        self.received_s: list[float] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.api_key: str | None = None
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.completions)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake", "object": "model"}]}

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "bad key"}}, status_code=401)
        self.bodies.append(body)
        self.received_s.append(time.perf_counter())
        if 13 in body["prompt"]:
            return JSONResponse({"error": {"message": "no thirteens"}}, status_code=400)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield ": keep-alive\n\n"
            for index in range(body["max_tokens"]):
                await asyncio.sleep(NEXT_CHUNK_S if index else FIRST_CHUNK_S)
                if 14 in body["prompt"] and index == 1:
                    yield _event({"error": {"message": "engine failed"}})
                    return
                yield _event({"choices": [{"text": "x", "index": 0}], "usage": None})
            if 15 not in body["prompt"]:
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": index + 1}
                yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.in_flight -= 1


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextlib.contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve on a free port of the loopback until the block ends; gives the base URL."""
    server = uvicorn.Server(
        uvicorn.Config(fake.app, host="127.0.0.1", port=0, log_level="warning", ws="none")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the fake server did not start"
        assert time.monotonic() < deadline, "the fake server did not start in 20 s"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
