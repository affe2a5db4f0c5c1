"""Server-sent events, and noticing that the client has gone.

Knows HTTP and asyncio; what an event holds is `completions`' and `chat`'s business.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from echokv.server.errors import as_api_error

T = TypeVar("T")

Events = AsyncGenerator[BaseModel, None]

DONE = "data: [DONE]\n\n"


_LINE_BREAKS = str.maketrans({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})
"""JSON holds no CR or LF, but these break lines too for clients that split with Unicode's rules."""


def frame(event: BaseModel) -> str:
    """One event on one line; fields that were not set are left out."""
    return f"data: {event.model_dump_json(exclude_unset=True).translate(_LINE_BREAKS)}\n\n"


async def or_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it when the client goes away first.

    Args:
        receive: the request's ASGI channel, its body already read.
        work: what to wait for.

    Raises:
        ClientDisconnect: the client went away.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def start_event_stream(request: Request, events: Events) -> Response:
    """A streaming response, once there is a first event.

    Until then nothing is sent, so that what fails before the first token has its own status.

    Args:
        request: the request, its body already read.
        events: closed when the stream ends, also when the client goes away.

    Raises:
        ClientDisconnect: the client went away before the first event.
        Exception: whatever `events` raised before its first event.
    """
    try:
        first = await or_disconnect(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


class EventStream(Response):
    """Sends events as they come; an exception on the way becomes an error event."""

    media_type = "text/event-stream"

    def __init__(self, first: BaseModel, events: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream; return early when the client goes away."""
        try:
            await or_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            return  # nobody is left to tell; what ran is aborted below
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await _send_text(send, frame(self._first))
        try:
            async for event in self._events:
                await _send_text(send, frame(event))
        except Exception as error:  # the status is sent: only an event can tell
            await _send_text(send, frame(as_api_error(error).body))
        await _send_text(send, DONE)
        await send({"type": "http.response.body", "body": b""})


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
