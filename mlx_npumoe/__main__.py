"""`python -m mlx_npumoe COMMAND ...` and the console scripts: finds the command, turns errors into one sentence."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Sequence

from .errors import NpumoeError, UsageError

TRACEBACK = "MLX_NPUMOE_TRACEBACK"  # environment variable: let unexpected errors through
COMMANDS = {
    "generate": "generate text, as mlx_lm.generate does, with hot experts on a second device",
    "chat": "talk to a model, as mlx_lm.chat does, with hot experts on a second device",
    "server": "serve models over HTTP, as mlx_lm.server does, with hot experts on a second device",
    "cache_prompt": "keep a prompt's cache in a file, as mlx_lm.cache_prompt does",
    "prepare": "calibrate, plan and emit everything a model needs; run once a model",
    "calibrate": "record how a model's experts are used on a text",
    "plan": "decide which experts go to the device, from a routing profile",
    "programs": "emit or check the Core ML programs of a plan",
    "inspect": "show a model's experts and what could move",
    "evaluate": "compare a model's quality on text with plain MLX",
    "manage": "list, verify and delete what is kept in the cache",
    "doctor": "show what works on this machine, what is off, and why",
}


def run(command: str, argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 1 for failure, 2 for usage, 130 when interrupted."""
    try:
        return importlib.import_module(f".commands.{command}", __package__).main(argv)
    except UsageError as e:
        print(f"mlx_npumoe.{command}: error: {e}", file=sys.stderr)
        return 2
    except NpumoeError as e:
        print(f"mlx_npumoe.{command}: error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return _unread()
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        print(f"mlx_npumoe.{command}: error: {where}{e.strerror or e}; nothing was written there.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nmlx_npumoe.{command}: interrupted", file=sys.stderr)
        return 130
    except Exception as e:  # ours or a library's: a user gets a sentence, whoever looks for the fault a traceback
        if os.environ.get(TRACEBACK):
            raise
        reason = " ".join(str(e).split()) or "no reason given"
        print(
            f"mlx_npumoe.{command}: error: {type(e).__name__}: {reason} (unexpected; set {TRACEBACK}=1 to see where)",
            file=sys.stderr,
        )
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mlx_npumoe`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        code = run(argv[0], argv[1:])
        return _ended(code) if argv[0] == "server" else code
    listing = "\n".join(f"  {name:<12} {what}" for name, what in COMMANDS.items())
    text = f"usage: python -m mlx_npumoe COMMAND ...\n\ncommands:\n{listing}\n\nCOMMAND --help tells more."
    if argv and argv[0] in ("-h", "--help"):
        try:
            print(text, flush=True)
        except BrokenPipeError:
            return _unread()
        return 0
    problem = f"unknown command {argv[0]!r}" if argv else "no command given"
    print(f"{text}\n\nmlx_npumoe: error: {problem}", file=sys.stderr)
    return 2


def _ended(code: int) -> int:
    """End the process at once where threads are left (a client's connection): Python's own way out may abort."""
    if threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _unread() -> int:
    """Whoever read our output has gone: let nothing more be written there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def generate() -> int:
    """Console script `mlx_npumoe.generate`."""
    return run("generate")


def chat() -> int:
    """Console script `mlx_npumoe.chat`."""
    return run("chat")


def server() -> int:
    """Console script `mlx_npumoe.server`."""
    return _ended(run("server"))


def cache_prompt() -> int:
    """Console script `mlx_npumoe.cache_prompt`."""
    return run("cache_prompt")


def prepare() -> int:
    """Console script `mlx_npumoe.prepare`."""
    return run("prepare")


def calibrate() -> int:
    """Console script `mlx_npumoe.calibrate`."""
    return run("calibrate")


def plan() -> int:
    """Console script `mlx_npumoe.plan`."""
    return run("plan")


def programs() -> int:
    """Console script `mlx_npumoe.programs`."""
    return run("programs")


def inspect() -> int:
    """Console script `mlx_npumoe.inspect`."""
    return run("inspect")


def evaluate() -> int:
    """Console script `mlx_npumoe.evaluate`."""
    return run("evaluate")


def manage() -> int:
    """Console script `mlx_npumoe.manage`."""
    return run("manage")


def doctor() -> int:
    """Console script `mlx_npumoe.doctor`."""
    return run("doctor")


if __name__ == "__main__":
    sys.exit(main())
