"""`make demo`: prepare the demo model once, ask it about a shipped text, fail if the device did nothing."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from ..__main__ import run
from ..data import demo_prompt
from ..errors import PreparedError
from ..prepared import Prepared, cached_folders

MODEL = "demo:smollm2"
CHUNK = 768  # the prompt has 755 tokens before the last
PREPARE = ("--model", MODEL, "--chunk", str(CHUNK), "--max-tokens", "1024")
GENERATE = ("--model", MODEL, "--max-tokens", "40", "--device", "interpreter")


def main() -> int:
    """Run both commands as a user would; exit code 1 where no program was launched."""
    start = time.perf_counter()
    if _prepared() is None:
        print(f"$ mlx_npumoe.prepare {' '.join(PREPARE)}", flush=True)
        if code := run("prepare", PREPARE):
            return code
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        print(f"\n$ mlx_npumoe.generate {' '.join(GENERATE)} --prompt <a shipped text and a question>", flush=True)
        argv = [*GENERATE, "--prepared", str(_prepared()), "--prompt", demo_prompt(), "--report", str(report)]
        if code := run("generate", argv):
            return code
        totals = json.loads(report.read_text())["totals"]
    print(f"\nDemo done in {time.perf_counter() - start:.0f} s.")
    if totals["launches"] == 0 or totals["fallbacks"]:
        print(f"The second device did not do its work: {totals}", file=sys.stderr)
        return 1
    return 0


def _prepared() -> Path | None:
    """A Prepared folder of the demo model, as the demo prepares it, in the cache."""
    for folder in cached_folders():
        try:
            found = Prepared.open(folder)
            if found.model == MODEL and found.plan.chunk == CHUNK:
                return folder
        except PreparedError:
            continue
    return None


if __name__ == "__main__":
    sys.exit(main())
