"""mlx-lm's HTTP server over models with engines. Knows mlx-lm's server and its threads; no flags, no devices.

Requests, answers, batching and prompt caches are mlx-lm's. Ours: how a model is loaded and let go, the phase of each
step, clients that leave, the way it ends, and the report at `GET /v1/npumoe/report`.

Threads: the caller of `serve` accepts connections, one thread a connection handles HTTP, and one generation thread
loads, runs and closes every model, since MLX's lazy arrays belong to the thread that made them.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import huggingface_hub

from . import loading
from .errors import ModelError, NpumoeError
from .generation import BatchGenerator, padding_known, stream_generate
from .report import Report
from .runtime import detach, report

REPORT_PATH = "/v1/npumoe/report"
PAST_REPORTS = 16
BACKLOG = 128  # connections that wait to be accepted
FAREWELL_S = 3.0  # how long a stopping server waits for its last answers to be written

Load = Callable[..., Any]  # (path, *, draft, **what mlx_lm.load takes)
_load: ContextVar[Load] = ContextVar("load")  # that of the models being loaded in this thread


def _own_copy() -> Any:
    """mlx_lm.server as a second module whose loops are ours, so that mlx-lm's own stays what it is."""
    found = importlib.util.find_spec("mlx_lm.server")
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location("mlx_lm.server_with_experts", found.origin)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it pickles requests for other ranks by class name
    spec.loader.exec_module(module)
    module.BatchGenerator = BatchGenerator
    module.stream_generate = stream_generate
    module.load = lambda path, **options: _load.get()(path, **options)
    module.Thread = partial(threading.Thread, daemon=True)  # the second signal ends the process at once
    module.scan_cache_dir = _hub_cache
    return module


def _hub_cache() -> Any:
    """The hub's cache, empty where there is none yet."""
    try:
        return huggingface_hub.scan_cache_dir()
    except huggingface_hub.errors.CacheNotFound:
        return SimpleNamespace(repos=())


_stock = _own_copy()


class _Parsed(Exception):
    """Carries mlx-lm's parser out of its `main`."""


def stock_parser() -> argparse.ArgumentParser:
    """A parser with every flag of the installed `mlx_lm.server`, which builds it inside its `main`."""

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_: Any, **__: Any) -> Any:
            raise _Parsed(self)

    with patch.object(_stock, "argparse", SimpleNamespace(ArgumentParser=Parser)):
        try:
            _stock.main()
        except _Parsed as e:
            parser: argparse.ArgumentParser = e.args[0]
            parser.__class__ = argparse.ArgumentParser
            return parser
    raise AssertionError("mlx_lm.server parses nothing")


class Models(_stock.ModelProvider):  # type: ignore[name-defined]
    """The model at hand, by request, with an engine or with the reason why it has none. Used by one thread.

    Only `reports` may be called by others.
    """

    model: Any

    def __init__(self, args: argparse.Namespace, load: Load) -> None:
        super().__init__(args)
        self._open = load
        self._past: deque[Report] = deque(maxlen=PAST_REPORTS)
        self._lock = threading.Lock()  # held where an engine closes or is looked at

    def load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> Any:
        """Model and tokenizer of a request. Raises ModelError; the model at hand stays where the name is unknown."""
        default = self.cli_args.model
        if model_path == "default_model" and default is None:
            raise ModelError("The request names no model and the server has none of its own; give it a `model`.")
        if default is not None and Path(default).exists() and Path(model_path).resolve() == Path(default).resolve():
            model_path = default  # as /v1/models writes it
        return super().load(model_path, adapter_path, draft_model_path)

    def reset(self) -> None:
        """Close the engine of the model at hand, keep its report, let the model go."""
        with self._lock:
            model, self.model = self.model, None
            if model is not None:
                self._past.append(_report(model))
                detach(model)
        super().reset()

    def reports(self) -> list[dict[str, Any]]:
        """What each model's device did, oldest first; the last is the model at hand where `loaded` is true."""
        with self._lock:
            known = [(r, False) for r in self._past]
            if self.model is not None:
                known.append((_report(self.model), True))
        return [{"loaded": loaded, **json.loads(r.to_json())} for r, loaded in known]

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        for path in (model_path, draft_model_path):
            if path is not None:
                loading.locate(path)  # before the model at hand is let go
        opened: list[Any] = []

        def load(path: str, **options: Any) -> Any:
            loaded = self._open(path, draft=bool(opened), **options)
            opened.append(loaded[0])
            return loaded

        token = _load.set(load)
        try:
            super()._load(model_path, adapter_path, draft_model_path)
        except BaseException:
            for model in opened:
                detach(model)
            raise
        finally:
            _load.reset(token)
        made = _report(self.model)
        logging.info(f"Loaded {made.model}, device {made.device}")


def _report(model: Any) -> Report:
    return report(model, getattr(model, "_npumoe_name", "model"))


class Generation(_stock.ResponseGenerator):  # type: ignore[name-defined]
    """mlx-lm's generation thread, which also ends generations nobody waits for and closes what it opened.

    Args:
        models: loaded and run by this thread alone.
        failed: called by the thread where the model the server was started with cannot be loaded.
    """

    def __init__(self, models: Models, failed: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._failed = failed
        super().__init__(models, _stock.LRUPromptCache(models.cli_args.prompt_cache_size))

    def _run_generate(self) -> None:
        try:
            try:
                self.model_provider.load_default()
            except Exception as e:
                self.error = e
                self._generation_failed = True
                return self._failed()
            with padding_known:
                super()._run_generate()
        finally:
            self.model_provider.reset()
            gc.collect()

    def _serve_single(self, request: tuple[Any, ...], stream: Any) -> None:
        answers, *rest = request
        super()._serve_single((_Answers(answers, lambda: self._stop), *rest), stream)

    def _await_response(self, response_queue: Any) -> Any:
        try:
            return super()._await_response(response_queue)
        except RuntimeError:
            if self._stop:
                raise ModelError("The server is stopping.") from None
            raise


class _Cancelled(NpumoeError):
    """Nobody waits for this generation."""


class _Answers:
    """The queue of one request. mlx-lm's loop for single requests looks for a cancellation only after a token."""

    def __init__(self, answers: queue.Queue[Any], stopping: Callable[[], bool]) -> None:
        self._answers = answers
        self._stopping = stopping
        self._context: Any = None

    def put(self, item: Any) -> None:
        if isinstance(item, _stock.GenerationContext):
            self._context = item
        elif self._stopping():
            if not isinstance(item, Exception):
                raise _Cancelled("The server is stopping.")
        elif isinstance(item, tuple) and self._context._should_stop:  # between chunks of a prompt
            raise _Cancelled("The client has gone.")
        self._answers.put(item)


class _ForClient:
    """A generation seen by one client's handler: before each step it looks whether the client is still there."""

    def __init__(self, generation: Generation, connection: socket.socket) -> None:
        self.cli_args = generation.cli_args
        self._generation = generation
        self._connection = connection

    def generate(self, request: Any, args: Any, progress_callback: Callable[[int, int], None]) -> Any:
        def progress(done: int, total: int) -> None:
            self._look()
            progress_callback(done, total)

        context, answers = self._generation.generate(request, args, progress)
        return context, self._steps(answers)

    def _steps(self, answers: Iterator[Any]) -> Iterator[Any]:
        for answer in answers:
            self._look()
            yield answer

    def _look(self) -> None:
        try:
            gone = not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if gone:
            raise ConnectionAbortedError("the client has gone")


class Handler(_stock.APIHandler):  # type: ignore[name-defined]
    """mlx-lm's handler with the report's path, errors as JSON at any point, and clients that may leave."""

    response_generator: Any
    _sent = False

    def do_GET(self) -> None:
        """Answer GET."""
        if self.path == REPORT_PATH:
            self._answer(200, {"models": self.response_generator.model_provider.reports()})
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Answer POST; whatever mlx-lm's handler lets through becomes JSON where a client still listens."""
        with self.server.answering:
            try:
                super().do_POST()
            except ConnectionError:
                raise
            except Exception as e:
                logging.error(f"{type(e).__name__}: {e}")
                self._fail(" ".join(str(e).split()) or type(e).__name__)

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Generate and answer."""
        generation = self.response_generator
        self.response_generator = _ForClient(generation, self.connection)
        try:
            super().handle_completion(request, stop_words)
        finally:
            self.response_generator = generation

    def end_headers(self) -> None:
        """Send the headers."""
        self._sent = True
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """A line a request, for those who want to see information."""
        logging.info(f"{self.address_string()} - {format % args}")

    def _fail(self, reason: str) -> None:
        if not self._sent:
            self._headers_buffer: list[bytes] = []  # mlx-lm may have begun a good answer
            self._answer(500, {"error": reason})
        elif getattr(self, "stream", False):
            self.wfile.write(f"data: {json.dumps({'error': reason})}\n\n".encode())

    def _answer(self, status: int, what: dict[str, Any]) -> None:
        self._set_completion_headers(status)
        text = json.dumps(what).encode()
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class _Answering:
    """Counts answers being written. A context manager for those who write."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until none is, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, timeout_s)


class _Http(ThreadingHTTPServer):
    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int, handler: Any) -> None:
        self.answering = _Answering()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = found[0]
            super().__init__(address, handler)  # type: ignore[arg-type]
        except OSError as e:
            raise NpumoeError(
                f"Cannot listen on {host}:{port} ({e.strerror or e}); give another --port or --host, or end what "
                "listens there."
            ) from e

    def server_bind(self) -> None:
        """Bind without asking name servers who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note what ended a connection; a client that leaves is no fault."""
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError):
            logging.info(f"{client_address[0]} has gone")
        else:
            logging.exception(f"The connection of {client_address[0]} failed")


class Server:
    """Serves from construction on, answers from `serve` on.

    Args:
        args: what `stock_parser` gives.
        load: `(path, *, draft, **options)`, as `mlx_npumoe.load`; `draft` for a model that only drafts.

    Raises:
        NpumoeError: it cannot listen there.
    """

    def __init__(self, args: argparse.Namespace, load: Load) -> None:
        self.stopping = False
        self.models = Models(args, load)
        self._http: _Http | None = None
        if _stock.mx.distributed.init().rank() == 0:
            self._http = _Http(args.host, args.port, self._handle)
        self._fingerprint = _stock.get_system_fingerprint()
        self.generation = Generation(self.models, self.stop)

    @property
    def url(self) -> str | None:
        """Where it listens; None for a rank that only computes."""
        if self._http is None:
            return None
        host = self._http.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self._http.server_port}"

    def _handle(self, *args: Any) -> Handler:
        return Handler(self.generation, *args, system_fingerprint=self._fingerprint)

    def serve(self) -> None:
        """Answer until `stop`. Raises what kept the model it was started with from being loaded."""
        if self._http is not None:
            self._http.serve_forever(poll_interval=0.1)
        else:
            self.generation.join()
        if self.generation.error is not None:
            raise self.generation.error

    def stop(self) -> None:
        """Make `serve` return. Safe in any thread and in a signal handler; returns at once."""
        self.stopping = True
        self.generation._stop = True
        if self._http is not None:
            threading.Thread(target=self._http.shutdown, daemon=True).start()

    def close(self) -> None:
        """Listen no more, end the generation after the step at hand, close every engine. Safe to call twice."""
        self.stopping = True
        if self._http is not None:
            self._http.server_close()
        self.generation.stop_and_join()
        if self._http is not None:
            self._http.answering.wait(FAREWELL_S)

    def reports(self) -> list[dict[str, Any]]:
        """What the device of each model did, oldest first."""
        return self.models.reports()
