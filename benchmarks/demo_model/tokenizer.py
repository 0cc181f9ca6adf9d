"""The demo model's tokenizer: byte-level BPE of 4096 tokens, as the files that Hugging Face and mlx-lm read.

Run: python -m mlx_npumoe.benchmarks.demo_model.tokenizer --work FOLDER, after `corpus`. Writes FOLDER/tokenizer/ and
the corpus as tokens, FOLDER/tokens/KIND.npy (uint16, an end-of-text token before each document).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .corpus import read
from .sources import COMPANIONS, KINDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 4096
END = "<|endoftext|>"  # token 0: before each document in training, and where generation stops
SAMPLE = 3_000_000  # bytes of each kind that the merges are learnt on
# Words with the space before them, single digits, runs of punctuation, line breaks with the indentation after them.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def learn(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer whose merges are the commonest in `texts`; every byte is a token, so nothing is unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """`tokenizer.json` and `tokenizer_config.json`; `longest` is the model's trained length in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="mlx_npumoe.benchmarks.demo_model.tokenizer", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="Where `corpus` wrote.")
    args = parser.parse_args(argv)
    from .shape import LONGEST

    corpus = args.work / "corpus"
    texts = {kind: [d.text for d in read(corpus, kind, "train")] for kind in (*KINDS, *COMPANIONS)}
    sample = []
    for kind in KINDS:  # documents spread over the kind
        size = sum(map(len, texts[kind]))
        sample += texts[kind][:: max(1, round(size / SAMPLE))]
    tokenizer = learn(sample)
    save(tokenizer, args.work / "tokenizer", LONGEST)
    (args.work / "tokens").mkdir(exist_ok=True)
    for kind, documents in texts.items():
        ids: list[int] = []
        for encoded in tokenizer.encode_batch([END + text for text in documents]):
            ids.extend(encoded.ids)
        np.save(args.work / "tokens" / f"{kind}.npy", np.array(ids, dtype=np.uint16))
        size = sum(len(text.encode()) for text in documents)
        print(f"{kind:11s} {len(ids) / 1e6:6.2f} M tokens, {size / len(ids):.2f} bytes a token")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
