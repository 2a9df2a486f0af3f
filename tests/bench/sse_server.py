"""A small server of OpenAI's completions and chat, that answers as it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Framing = Literal["chunked", "length", "until-close"]


class Behaviour:
    """How it answers; and what it was asked."""

    def __init__(self) -> None:
        self.framing: Framing = "chunked"
        self.cut_in_pieces_of = 10**9  # bytes: events torn apart, or several in one piece
        self.tells_usage = True
        self.num_events_before_end: int | None = None  # then the connection breaks
        self.status = 200
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.first_event = ""
        self.has_chat = True
        self.keeps_alive = False
        self.num_connections = 0
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []

    def events(self, body: dict[str, Any]) -> list[str]:
        count = body.get("max_tokens", 3)
        chats = "messages" in body
        texts = [f" t{i}" for i in range(count)]
        choices = [{"delta": {"content": text}} if chats else {"text": text} for text in texts]
        choices[-1]["finish_reason"] = "stop"
        events = [json.dumps({"choices": [choice]}) for choice in choices]
        if self.tells_usage:
            usage = {
                "prompt_tokens": len(body["messages" if chats else "prompt"]),
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": 2},
            }
            events.append(json.dumps({"choices": [], "usage": usage}))
        events.append("[DONE]")
        if self.first_event:
            events.insert(0, self.first_event)
        return events[: self.num_events_before_end]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def setup(self) -> None:
        super().setup()
        self.behaviour.num_connections += 1

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(json.dumps(self.behaviour.models).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.behaviour.asked.append((self.path, body))
        self.behaviour.headers.append(dict(self.headers.items()))
        if "messages" in body and not self.behaviour.has_chat:
            self.behaviour.status = 400
            said = {"error": {"message": "this model has no chat template"}}
            self._answer(json.dumps(said).encode(), "application/json")
            self.behaviour.status = 200
            return
        if self.behaviour.status != 200:
            self._answer(b'{"error": "the prompt is too long"}', "application/json")
            return
        lines = [": a comment\n\n", *(f"data: {e}\n\n" for e in self.behaviour.events(body))]
        self._answer("".join(lines).encode(), "text/event-stream")

    def _answer(self, data: bytes, content_type: str) -> None:
        how = self.behaviour
        broken = how.num_events_before_end is not None
        self.send_response(how.status)
        self.send_header("Content-Type", content_type)
        if how.framing == "length":
            self.send_header("Content-Length", str(len(data) + broken))
        elif how.framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        if not how.keeps_alive:  # or a client would ask again on a connection that ends
            self.send_header("Connection", "close")
        self.end_headers()
        for start in range(0, len(data), how.cut_in_pieces_of):
            piece = data[start : start + how.cut_in_pieces_of]
            if how.framing == "chunked":
                piece = b"%x;note=1\r\n%s\r\n" % (len(piece), piece)
            self.wfile.write(piece)
            self.wfile.flush()
        if how.framing == "chunked" and not broken:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = not how.keeps_alive


@contextmanager
def serving() -> Iterator[tuple[str, Behaviour]]:
    """Its address, and how it behaves."""
    behaviour = Behaviour()
    handler = type("Handler", (_Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", behaviour
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
