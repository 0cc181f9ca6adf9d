"""`mlx_npumoe.server`: every flag of the installed `mlx_lm.server`, and ours."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import UsageError
from ..progress import note
from . import parse, write_text
from .attached import add_attachment, load_as_asked, require_positive, require_usable

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def setup_arg_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser with our flags."""
    serving = importlib.import_module("mlx_npumoe.serving")
    parser: argparse.ArgumentParser = serving.stock_parser()
    parser.prog = "mlx_npumoe.server"
    add_attachment(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = parse(setup_arg_parser(), argv)
    require_usable(args)
    _require_sane(args)
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from ..loading import locate
    from ..prepared import Prepared
    from ..serving import Server

    for name in (args.model, args.draft_model):
        if name is not None:
            locate(name)  # what is wrong with a name or a folder is said before anybody connects
    if args.prepared not in ("auto", "none"):
        Prepared.open(args.prepared)
    maybe_set_recommended_wired_limit()
    level = "WARNING" if args.quiet and args.log_level == "INFO" else args.log_level
    logging.basicConfig(level=getattr(logging, level), format="%(asctime)s - %(levelname)s - %(message)s")
    server = Server(args, _loader(args))
    with _signals(server):
        _announce(server, args)
        try:
            server.serve()
        finally:
            server.close()
            result = {"models": server.reports()}
            if args.report:
                write_text(args.report, json.dumps(result, indent=2) + "\n")
            if args.json:
                print(json.dumps(result), flush=True)
    return 0


def _require_sane(args: argparse.Namespace) -> None:
    require_positive(
        args,
        "max_tokens",
        "decode_concurrency",
        "prompt_concurrency",
        "prefill_step_size",
        "prompt_cache_size",
        "kv_group_size",
    )
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is no port; give a number from 0 (any free one) to 65535.")
    if args.num_draft_tokens < 0:
        raise UsageError(f"--num-draft-tokens {args.num_draft_tokens} is negative.")
    if args.model is None and args.prepared not in ("auto", "none"):
        raise UsageError("--prepared names what was made of one model; name that model with --model.")


def _loader(args: argparse.Namespace) -> Any:
    """`(path, draft, **options)`: load as the flags say; a folder of `--prepared` is for `--model` alone."""

    def load(path: str, *, draft: bool, **options: Any) -> Any:
        own = path == args.model or args.prepared == "none"
        asked = args if own else argparse.Namespace(**{**vars(args), "prepared": "auto"})
        return load_as_asked(asked, path, plain=draft, **options)

    return load


def _announce(server: Any, args: argparse.Namespace) -> None:
    if server.url is None:  # a rank that only computes
        return
    if args.json:
        print(json.dumps({"url": server.url}), flush=True)
    note(f"Listening at {server.url} (Ctrl-C stops); it is made for use by one person and checks nobody's identity.")
    if args.host not in LOOPBACK:
        note(f"Note: --host {args.host} lets everybody who reaches this machine's network use it.")


@contextmanager
def _signals(server: Any) -> Iterator[None]:
    """SIGINT and SIGTERM stop the server after the step at hand; a second one ends the process at once."""

    def stop(number: int, _: object) -> None:
        if server.stopping:
            os._exit(128 + number)
        server.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
