"""Trains the demo model on the CPU within a time budget.

Run: python -m mlx_npumoe.benchmarks.demo_model.train --work FOLDER --minutes 90, after `tokenizer`. Started again
with the same --run it goes on from the last checkpoint. Writes FOLDER/RUN/checkpoint.safetensors (weights and
optimiser, every few minutes), model.safetensors (weights at the end) and log.jsonl. Learning rate, batch and sequence
length follow the share of the budget that is used, so a run always ends annealed; the order of the data follows
the seed.

Work is shared by threads that each take the next part of a batch: on a busy machine no operation waits for a slow core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .corpus import read
from .model import Model
from .optimiser import Optimiser, Rates
from .sampling import Sampler
from .scoring import Window, bits_per_byte, windows
from .shape import CONFIG
from .sources import KINDS

BALANCE, Z_LOSS, CLIP = 0.003, 1e-4, 1.0
PART = 1024  # tokens that one thread takes at a time
MUON = Rates(matrices=1.2e-3, table=4e-3, router=2e-3, norms=2e-3, decay=0.3)
ADAM = Rates(matrices=3e-3, table=3e-3, router=3e-3, norms=3e-3, decay=0.1)
# (share of the budget used, tokens of a sequence, tokens of a batch)
STAGES = ((0.0, 256, 4096), (0.35, 256, 8192), (0.6, 512, 8192), (0.85, 1024, 8192))


@dataclass
class State:
    """Where a run is."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def stage(progress: float, stages: Sequence[tuple[float, int, int]]) -> tuple[int, int]:
    """Sequence length and batch, both in tokens, at a share of the budget."""
    return next((length, batch) for start, length, batch in reversed(stages) if progress >= start)


def rate(progress: float, warmup: float = 0.02, stable: float = 0.3) -> float:
    """The factor of all learning rates: a linear rise, a plateau, then linearly down to nothing."""
    if progress < warmup:
        return max(progress, 0.002) / warmup
    return min(1.0, (1 - progress) / (1 - stable))


def cosine(progress: float, warmup: float = 0.02) -> float:
    """The plain recipe's factor: a linear rise, then a cosine to a tenth."""
    if progress < warmup:
        return max(progress, 0.002) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


class Trainer:
    """A model, its optimiser and the threads that work on them."""

    def __init__(self, model: Model, optimiser: Optimiser, threads: int) -> None:
        self.model, self.optimiser = model, optimiser
        self.pool = ThreadPoolExecutor(threads)
        self.local = threading.local()

    def run(self, jobs: Iterable[Callable[[], Any]]) -> list[Any]:
        """Do all jobs, in threads; an error of one is raised."""
        return [future.result() for future in [self.pool.submit(job) for job in jobs]]

    def step(self, batch: Tensor, factor: float) -> dict[str, Any]:
        """One update on `batch` (B, T + 1)."""
        sums: dict[int, list[Tensor]] = {}
        rows = max(1, PART // (batch.shape[1] - 1))
        parts = batch.split(rows)

        def work(part: Tensor) -> tuple[float, float, Tensor]:
            share = len(part) / len(batch)
            loss, entropy, balance, loads = self.model.losses(part[:, :-1], part[:, 1:], Z_LOSS)
            grads = torch.autograd.grad((loss + BALANCE * balance) * share, self.optimiser.parameters)
            mine = sums.get(threading.get_ident())
            if mine is None:
                sums[threading.get_ident()] = list(grads)
            else:
                torch._foreach_add_(mine, list(grads))
            return entropy.item() * share, balance.item() * share, loads * share

        done = self.run([partial(work, part) for part in parts])
        first, *others = sums.values()
        for other in others:
            torch._foreach_add_(first, other)
        norm = torch.stack(torch._foreach_norm(first)).norm().item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"The gradient of step {self.optimiser.count + 1} is not finite.")
        if norm > CLIP:
            torch._foreach_mul_(first, CLIP / norm)
        self.optimiser.step(first, factor, self.run)
        loads = torch.stack([load for _, _, load in done]).sum(0)
        return {"loss": sum(d[0] for d in done), "balance": sum(d[1] for d in done), "norm": norm, "loads": loads}

    def evaluate(self, texts: dict[str, list[tuple[list[int], int]]], length: int, most: int) -> dict[str, float]:
        """Bits per byte of each kind, over its first `most` tokens."""
        found = {}
        for kind, documents in texts.items():
            chosen = windows(documents, length, most)

            def lost(window: Window) -> float:
                return -self.model.log_likelihoods(*torch.tensor(window.tokens)[:, None]).sum().item()

            nats = sum(self.run([partial(lost, window) for window in chosen]))
            found[kind] = bits_per_byte(nats, sum(w.bytes for w in chosen))
        return found


def save(path: Path, trainer: Trainer, state: State, sampler: Sampler) -> None:
    """Weights, optimiser and place of a run in one file, written beside and renamed."""
    optimiser = trainer.optimiser
    tensors: dict[str, Tensor] = {}
    for name, parameter, one, two in zip(
        optimiser.names, optimiser.parameters, optimiser.first, optimiser.second, strict=True
    ):
        tensors |= {f"model.{name}": parameter.detach(), f"first.{name}": one, f"second.{name}": two}
    place = {"state": vars(state), "taken": sampler.taken, "count": optimiser.count}
    save_file(tensors, str(path.with_suffix(".part")), metadata={"place": json.dumps(place)})
    os.replace(path.with_suffix(".part"), path)


def resume(path: Path, trainer: Trainer, sampler: Sampler) -> State:
    """The inverse of `save`."""
    optimiser = trainer.optimiser
    with safe_open(str(path), "pt") as saved, torch.no_grad():
        place = json.loads(saved.metadata()["place"])
        for i, name in enumerate(optimiser.names):
            optimiser.parameters[i].copy_(saved.get_tensor(f"model.{name}"))
            optimiser.first[i].copy_(saved.get_tensor(f"first.{name}"))
            optimiser.second[i].copy_(saved.get_tensor(f"second.{name}"))
    optimiser.count, sampler.taken = place["count"], place["taken"]
    return State(**place["state"])


def held_out_texts(work: Path) -> dict[str, list[tuple[list[int], int]]]:
    """(tokens, bytes) of each held-out document of each kind."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    return {
        kind: [(tokenizer.encode(d.text).ids, len(d.text.encode())) for d in read(work / "corpus", kind, "heldout")]
        for kind in KINDS
    }


def setup_parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    parser = argparse.ArgumentParser(prog="mlx_npumoe.benchmarks.demo_model.train", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="Where `tokenizer` wrote.")
    parser.add_argument(
        "--run", default="run", metavar="NAME", help="Subfolder of this run; an existing one is resumed."
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="Time budget, over all resumed parts.")
    budget.add_argument("--tokens", type=float, metavar="MILLIONS", help="Token budget instead, for comparisons.")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="The plain recipe: AdamW, cosine, 24 sequences of 256.")
    parser.add_argument("--rates", metavar="JSON", help="Rates that differ, for trials: '{\"matrices\": 0.001}'.")
    parser.add_argument("--checkpoint-minutes", type=float, default=4.0)
    parser.add_argument("--evaluate-minutes", type=float, default=10.0)
    parser.add_argument("--evaluate-tokens", type=int, default=12_000, help="Of each kind, during training.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = setup_parser().parse_args(argv)
    if not (args.work / "tokens").is_dir():
        print(f"{args.work} holds no tokens; run the corpus and tokenizer commands first.", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rates, stages, factor = (ADAM, ((0.0, 256, 6144),), cosine) if args.plain else (MUON, STAGES, rate)
    if args.rates:
        rates = Rates(**{**vars(rates), **json.loads(args.rates)})
    model = Model(CONFIG)
    trainer = Trainer(model, Optimiser(model, rates, muon=not args.plain), args.threads)
    sampler = Sampler(args.work / "tokens", args.seed)
    folder = args.work / args.run
    folder.mkdir(exist_ok=True)
    checkpoint = folder / "checkpoint.safetensors"
    state = resume(checkpoint, trainer, sampler) if checkpoint.exists() else State()
    texts = held_out_texts(args.work)
    with open(folder / "log.jsonl", "a", encoding="utf-8") as log:

        def note(**facts: Any) -> None:
            line = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 1), **facts}
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(json.dumps(line), flush=True)

        note(
            event="start",
            parameters=sum(p.numel() for p in model.parameters()),
            rates=vars(rates),
            torch=torch.__version__,
        )
        train(args, trainer, sampler, state, texts, note, stages, factor, checkpoint)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        save_file(weights, str(folder / "model.safetensors"), metadata={"place": json.dumps({"state": vars(state)})})
        found = trainer.evaluate(texts, 256, args.evaluate_tokens)
        note(event="end", mean=sum(found.values()) / len(found), bits_per_byte=found)
    return 0


def train(
    args: argparse.Namespace,
    trainer: Trainer,
    sampler: Sampler,
    state: State,
    texts: dict[str, list[tuple[list[int], int]]],
    note: Callable[..., None],
    stages: Sequence[tuple[float, int, int]],
    factor: Callable[[float], float],
    checkpoint: Path,
) -> None:
    """Steps until the budget is used; `state` counts them."""
    before = time.monotonic() - state.seconds
    saved = evaluated = state.seconds
    losses, since = [], (time.monotonic(), time.process_time(), state.tokens)
    while True:
        state.seconds = time.monotonic() - before
        progress = state.seconds / (60 * args.minutes) if args.minutes else state.tokens / (1e6 * args.tokens)
        if progress >= 1:
            return
        length, tokens = stage(progress, stages)
        batch = torch.from_numpy(sampler.batch(tokens // length, length))
        done = trainer.step(batch, factor(progress))
        state.step += 1
        state.tokens += tokens
        losses.append(done["loss"])
        if state.step % 20 == 0:
            now, cpu = time.monotonic(), time.process_time()
            loads = done["loads"]  # (layers, E)
            note(
                progress=round(progress, 4),
                loss=round(sum(losses) / len(losses), 4),
                balance=round(done["balance"], 3),
                norm=round(done["norm"], 3),
                tokens_a_second=round((state.tokens - since[2]) / (now - since[0])),
                cores=round((cpu - since[1]) / (now - since[0]), 2),
                skew=[round(x, 2) for x in (loads.amax(-1) * loads.shape[1]).tolist()],
            )
            losses, since = [], (now, cpu, state.tokens)
        state.seconds = time.monotonic() - before
        if state.seconds - saved > 60 * args.checkpoint_minutes:
            save(checkpoint, trainer, state, sampler)
            saved = state.seconds
        if state.seconds - evaluated > 60 * args.evaluate_minutes:
            found = trainer.evaluate(texts, 256, args.evaluate_tokens)
            note(event="held out", mean=round(sum(found.values()) / len(found), 4), bits_per_byte=found)
            evaluated = state.seconds


if __name__ == "__main__":
    raise SystemExit(main())
