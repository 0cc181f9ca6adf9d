"""Bits per byte of the held-out texts, by kind: of an exported folder through mlx-lm, or of a run's weights in torch.

Run: python -m mlx_npumoe.benchmarks.demo_model.evaluate --work FOLDER --model OUT, or --run NAME for torch. The
torch figure and that of the float16 folder agree to the third decimal; the 8-bit one shows what quantising costs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .corpus import read
from .scoring import END_ID, Window, bits_per_byte, windows
from .sources import KINDS

Scorer = Callable[[np.ndarray, np.ndarray], np.ndarray]  # inputs, targets (B, T) -> nats (B, T)
TOKENS_A_CALL = 4096
DRAWS = 2000


def through_mlx(folder: Path) -> Scorer:
    """A scorer that calls the folder's model as mlx-lm builds it, in float32 unless quantised."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    model, config = load_model(folder)
    if "quantization" not in config:  # its Linux kernels for experts are float32 only
        model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))

    def score(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        logits = model(mx.array(tokens)).astype(mx.float32)
        chosen = mx.take_along_axis(logits, mx.array(targets)[..., None], axis=-1).squeeze(-1)
        return np.array(mx.logsumexp(logits, axis=-1) - chosen)

    return score


def through_torch(weights: Path) -> Scorer:
    """A scorer of a run's weights in the training code."""
    import torch
    from safetensors.torch import load_file

    from .model import Model
    from .shape import CONFIG

    model = Model(CONFIG)
    model.load_state_dict(load_file(str(weights)))

    def score(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        nats = -model.log_likelihoods(torch.from_numpy(tokens), torch.from_numpy(targets))
        return nats.numpy().reshape(tokens.shape)

    return score


def nats(score: Scorer, chosen: Sequence[Window], length: int) -> float:
    """Summed over all targets; windows are padded at their end to one length, several a call."""
    total = 0.0
    for start in range(0, len(chosen), max(1, TOKENS_A_CALL // length)):
        some = chosen[start : start + max(1, TOKENS_A_CALL // length)]
        both = np.full((2, len(some), max(len(w.tokens[0]) for w in some)), END_ID, dtype=np.int64)
        for row, window in enumerate(some):
            both[:, row, : len(window.tokens[0])] = window.tokens
        lost = score(*both)
        total += sum(float(lost[row, : len(w.tokens[0])].sum(dtype=np.float64)) for row, w in enumerate(some))
    return total


def interval(lost: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval over documents of their bits per byte."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(lost), size=(DRAWS, len(lost)))
    figures = np.array(lost)[draws].sum(1) / math.log(2) / np.array(sizes)[draws].sum(1)
    low, high = np.percentile(figures, [2.5, 97.5])
    return float(low), float(high)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="mlx_npumoe.benchmarks.demo_model.evaluate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="Where the corpus and the runs are.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, metavar="OUT", help="An exported folder, through mlx-lm.")
    which.add_argument("--run", metavar="NAME", help="A finished run's weights, in torch.")
    parser.add_argument("--window", type=int, default=256, help="Tokens a call that see each other. Default: 256.")
    parser.add_argument("--tokens", type=int, metavar="N", help="Of each kind. Default: all.")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    needed = (args.model / "config.json") if args.model else args.work / args.run / "model.safetensors"
    if not needed.exists():
        print(f"{needed} does not exist; run the export or train command first.", file=sys.stderr)
        return 1
    from tokenizers import Tokenizer

    folder = args.model or args.work / "tokenizer"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    score = through_mlx(args.model) if args.model else through_torch(needed)
    found = {}
    for kind in KINDS:
        lost, sizes, left = [], [], args.tokens
        for document in read(args.work / "corpus", kind, "heldout"):
            ids = tokenizer.encode(document.text).ids
            chosen = windows([(ids, len(document.text.encode()))], args.window, left)
            lost.append(nats(score, chosen, args.window))
            sizes.append(sum(w.bytes for w in chosen))
            if left is not None and (left := max(0, left - len(ids))) == 0:
                break
        low, high = interval(lost, sizes)
        figure = bits_per_byte(sum(lost), sum(sizes))
        found[kind] = {
            "bits_per_byte": figure,
            "low": low,
            "high": high,
            "documents": len(lost),
            "bytes": round(sum(sizes)),
        }
        if not args.json:
            print(
                f"{kind:11s} {figure:.3f} ({low:.3f} to {high:.3f}, {len(lost)} documents, {sum(sizes) / 1e3:.0f} kB)"
            )
    mean = sum(f["bits_per_byte"] for f in found.values()) / len(found)
    if args.json:
        print(json.dumps({"window": args.window, "mean": mean, "kinds": found}, indent=2))
    else:
        print(f"{'mean':11s} {mean:.4f} bits per byte, windows of {args.window} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
