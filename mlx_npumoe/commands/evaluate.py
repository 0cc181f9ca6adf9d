"""`mlx_npumoe.evaluate`: a model with its experts on the second device beside the same model on plain MLX."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from . import parse, parser, positive


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser(
        "evaluate",
        "Compare a model with its experts on the second device with the same model on plain MLX: perplexity, "
        "next-token accuracy, greedy agreement and KL divergence on text, with bootstrap intervals.",
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
    args = parse(made, argv)

    from ..comparison import compare
    from ..data import held_out_documents
    from ..generation import load
    from ..recording import read_documents
    from ..runtime import engine

    if args.text:
        documents, source = read_documents(args.text)
    else:
        documents, source = held_out_documents(), "shipped held-out texts"
    model, tokenizer = load(args.model, prepared=args.prepared, device=args.device)
    attached = engine(model)
    if attached is None or attached.device is None:
        raise UsageError(
            f"There is nothing to compare: {args.model} runs on plain MLX alone; prepare it, or give --prepared FOLDER "
            "and a --device."
        )

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
    report = attached.report()
    attached.close()
    if args.json:
        print(json.dumps({"source": source, **found.to_dict(), "report": json.loads(report.to_json())}, indent=2))
    else:
        print(f"{source}: {found.table()}")
        print(report.line())
    return 0
