"""Which text is kept and where it goes: near-duplicates removed by word n-grams, documents held out by name."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

HELD_OUT_ONE_IN = 50
NGRAM = 8  # words
SEEN_SHARE = 0.5  # a block with more of its n-grams seen before is a near-duplicate
LARGEST_KIND = 14_000_000  # bytes of one kind that are trained on
LOST_SHARE = 0.5  # a document that loses more of its characters is dropped whole


@dataclass(frozen=True)
class Document:
    """One document: `kind` of text, `name` unique in its kind, cleaned `text`."""

    kind: str
    name: str
    text: str


def name_hash(document: Document) -> int:
    """64 bits of its kind and name: no seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{document.kind}/{document.name}".encode()).digest()[:8], "big")


def held_out(document: Document) -> bool:
    """1 document in 50 of each kind, by the hash of its name."""
    return name_hash(document) % HELD_OUT_ONE_IN == 0


def ngrams(text: str) -> np.ndarray:
    """Hashes of all runs of 8 words, case and punctuation apart: uint64 (words - 7,), empty for a shorter text."""
    words = np.array([zlib.crc32(w.encode()) for w in re.findall(r"\w+", text.lower())], dtype=np.uint64)
    if len(words) < NGRAM:
        return np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(len(words) - NGRAM + 1, dtype=np.uint64)
    for position in range(NGRAM):  # a polynomial modulo 2**64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[position : position + len(hashes)] + np.uint64(1)
    return hashes ^ (hashes >> np.uint64(29))


def without_near_duplicates(documents: Iterable[Document]) -> Iterator[Document]:
    """Documents without the blocks (text between empty lines) that an earlier document had.

    Held-out documents come first, so that nothing near to them is left in what is trained on. A document repeats
    itself freely. Yields in that order; documents that lose most of their text are left out.
    """
    documents = list(documents)
    seen: set[int] = set()
    for document in sorted(documents, key=lambda d: not held_out(d)):
        blocks, own = [], []
        for block in document.text.split("\n\n"):
            grams = ngrams(block).tolist()
            if sum(g in seen for g in grams) > SEEN_SHARE * len(grams):
                continue
            blocks.append(block)
            own.extend(grams)
        seen.update(own)
        text = "\n\n".join(blocks).strip("\n") + "\n"
        if len(text) > LOST_SHARE * len(document.text):
            yield Document(document.kind, document.name, text)


def within_size(documents: Iterable[Document], largest: int = LARGEST_KIND) -> list[Document]:
    """Documents of one kind to train on, at most `largest` bytes of them: those of the smallest name hashes."""
    chosen, size = [], 0
    for document in sorted(documents, key=name_hash):
        size += len(document.text.encode())
        if size > largest:
            break
        chosen.append(document)
    return sorted(chosen, key=lambda d: d.name)
