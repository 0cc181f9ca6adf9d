"""`mlx_npumoe.evaluate`: a model with its experts on the second device beside the same model on plain MLX."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..tasks import BUILT_IN, make
from . import add_overflow, overflow_options, parse, parser, positive


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser(
        "evaluate",
        "Compare a model with its experts on the second device with the same model on plain MLX: perplexity, "
        "next-token accuracy, greedy agreement and KL divergence on text, or answers to questions, with bootstrap "
        "intervals.",
    )
    made.add_argument("--model", required=True, help="Folder, hub repository or demo:NAME.")
    made.add_argument("--prepared", default="auto", metavar="FOLDER", help="'auto' looks in the cache.")
    made.add_argument("--device", choices=("auto", "interpreter"), default="auto", help="Where hot experts run.")
    made.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 files, a document each. Default: shipped texts that no calibration sees.",
    )
    made.add_argument("--max-tokens", type=positive, default=8192, help="Over all documents. Default: 8192.")
    made.add_argument("--window", type=positive, default=512, help="Tokens a call. Default: 512.")
    made.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=f"Ask questions instead: {', '.join(BUILT_IN)}, or tasks of lm-evaluation-harness (install "
        "mlx_npumoe[evaluate]), each answered with the device and without.",
    )
    made.add_argument("--questions", type=positive, default=100, help="A task. Default: 100.")
    made.add_argument("--length", type=positive, default=512, help="Tokens of a ruler prompt. Default: 512.")
    made.add_argument("--task-folder", metavar="FOLDER", help="The harness's YAML files of your own tasks.")
    add_overflow(made)
    args = parse(made, argv)
    policies = overflow_options(args)

    from ..data import held_out_documents
    from ..generation import load
    from ..recording import read_documents
    from ..runtime import engine

    if args.text:
        documents, source = read_documents(args.text)
    else:
        documents, source = held_out_documents(), "shipped held-out texts"
    model, tokenizer = load(args.model, prepared=args.prepared, device=args.device, **policies)
    attached = engine(model)
    if attached is None or attached.device is None:
        raise UsageError(
            f"There is nothing to compare: {args.model} runs on plain MLX alone; prepare it, or give --prepared FOLDER "
            "and a --device."
        )

    try:
        if args.tasks:
            shown, text = _tasks(args, model, tokenizer, attached)
        else:
            shown, text = _text(args, model, tokenizer, attached, documents, source)
        report = attached.report()
    finally:
        attached.close()
    if args.json:
        print(json.dumps({**shown, "report": json.loads(report.to_json())}, indent=2))
    else:
        print(text)
        print(report.line())
    return 0


Shown = tuple[dict[str, Any], str]  # for machines, for people


def _text(args: Namespace, model: Any, tokenizer: Any, attached: Any, documents: list[str], source: str) -> Shown:
    from ..comparison import compare

    def reference(tokens: Any) -> Any:
        with attached.paused():
            return model(tokens)

    texts, left = [], args.max_tokens
    for document in documents:
        texts.append(tokenizer.encode(document)[:left])
        left -= len(texts[-1])
        if not left:
            break
    found = compare(model, reference, texts, window=args.window, progress=not args.quiet)
    return {"source": source, **found.to_dict()}, f"{source}: {found.table()}"


def _tasks(args: Namespace, model: Any, tokenizer: Any, attached: Any) -> Shown:
    from ..tasks.harness import run_tasks
    from ..tasks.scoring import compare_answers

    def size(text: str) -> int:
        return len(tokenizer.encode(text))

    rows: list[dict[str, Any]] = []
    lines = [f"  {'':<22}{'plain MLX':>12}{'this':>12}   change"]
    others = [task for task in args.tasks if task not in BUILT_IN]
    if others:
        options = {"folder": args.task_folder, "limit": args.questions}
        mine = run_tasks(model, tokenizer, others, **options)
        with attached.paused():
            theirs = run_tasks(model, tokenizer, others, **options)
        for task, metrics in mine.items():
            rows.append({"task": task, "metrics": metrics, "reference_metrics": theirs[task]})
            lines += [
                f"  {f'{task} {name}':<22}{theirs[task][name]:>12.4f}{value:>12.4f}   {value - theirs[task][name]:+.4f}"
                for name, value in metrics.items()
            ]
    for task in (task for task in args.tasks if task in BUILT_IN):
        questions = make(task, args.questions, args.length, size)
        found = compare_answers(task, model, tokenizer, questions, attached.paused(), progress=not args.quiet)
        rows.append({**found.to_dict(), "length": args.length if task.startswith("ruler") else None})
        lines.append(found.line())
    return {"tasks": rows}, "\n".join(lines)
