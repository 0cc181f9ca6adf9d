"""HTTP servers of tests, on loopback and a free port: mlx-lm's own, and ours over the interpreter."""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from mlx_npumoe.commands.server import _loader, setup_arg_parser
from mlx_npumoe.serving import REPORT_PATH, Server, stock_parser


class Client:
    """Asks a server. `server` is ours, None for mlx-lm's."""

    def __init__(self, url: str, server: Server | None = None) -> None:
        self.url = url
        self.server = server

    def connect(self) -> http.client.HTTPConnection:
        """A connection that gives up after a minute."""
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON."""
        return self._answer("GET", path, None)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        return self._answer("POST", path, json.dumps(body))

    def _answer(self, method: str, path: str, body: str | None) -> tuple[int, Any]:
        connection = self.connect()
        connection.request(method, path, body)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def complete(self, prompt: str, max_tokens: int = 12, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, answer = self.post("/v1/completions", prompt=prompt, max_tokens=max_tokens, **body)
        assert status == 200, answer
        return answer

    def text(self, prompt: str, max_tokens: int = 12, **body: Any) -> str:
        """The text of a completion."""
        return self.complete(prompt, max_tokens, **body)["choices"][0]["text"]

    def stream(self, path: str, **body: Any) -> Iterator[str]:
        """The lines of a streamed answer; closing the iterator leaves the connection."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        assert answer.status == 200
        try:
            for line in answer:
                yield line.decode().strip()
        finally:
            answer.close()
            connection.close()

    def reports(self) -> list[dict[str, Any]]:
        """What our report endpoint says."""
        status, answer = self.get(REPORT_PATH)
        assert status == 200
        return answer["models"]

    def leased(self) -> int:
        """Surfaces of the model at hand that are out."""
        assert self.server is not None
        rings = self.server.models.model._npumoe_engine.device._rings._rings.values()
        return sum(len(ring) - len(ring._free) for ring in rings)


def parsed(parser: argparse.ArgumentParser, *argv: str) -> argparse.Namespace:
    """Flags with a free port."""
    return parser.parse_args(["--port", "0", *argv])


@contextmanager
def ours(*argv: str) -> Iterator[Client]:
    """Our server, closed at the end."""
    args = parsed(setup_arg_parser(), "--device", "interpreter", *argv)
    server = Server(args, _loader(args))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield Client(str(server.url), server)
    finally:
        server.stop()
        thread.join(30)
        server.close()
        assert not thread.is_alive() and not server.generation._generation_thread.is_alive()


@contextmanager
def stock(*argv: str) -> Iterator[Client]:
    """mlx-lm's server as it is."""
    module = importlib.import_module("mlx_lm.server")
    provider = module.ModelProvider(parsed(stock_parser(), *argv))
    generation = module.ResponseGenerator(provider, module.LRUPromptCache(10))
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler.of(module), generation))
    thread = threading.Thread(target=http_server.serve_forever)
    thread.start()
    try:
        yield Client(f"http://127.0.0.1:{http_server.server_port}")
    finally:
        http_server.shutdown()
        http_server.server_close()
        generation.stop_and_join()
        thread.join(30)


class _QuietHandler:
    @staticmethod
    def of(module: Any) -> type:
        """mlx-lm's handler without its line a request."""
        return type("Handler", (module.APIHandler,), {"log_message": lambda *_: None})


def until(what: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
