"""The corpus of the demo model: Debian documentation packages, cleaned, near-duplicates removed, split by document.

Run: python -m mlx_npumoe.benchmarks.demo_model.corpus --work FOLDER. Needs a Debian machine (`apt-get download`,
`dpkg-deb`; no root), network, 2 GB of disk and 3 GB of memory. Writes FOLDER/corpus/KIND.train.jsonl and
KIND.heldout.jsonl (a document a line: name, text) and corpus.json (packages, versions, licences, sizes, hashes).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .selection import Document, held_out, within_size, without_near_duplicates
from .sources import COMPANIONS, KINDS, RENDERER, SOURCES, documents


def fetch(work: Path) -> dict[str, str]:
    """Download and unpack every package that is not there yet, without root: {package: version}."""
    packages = [*(source.package for source in SOURCES), RENDERER]
    debs, trees = work / "debs", work / "tree"
    debs.mkdir(parents=True, exist_ok=True)
    missing = [p for p in packages if not list(debs.glob(f"{p}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=debs, check=True)
    versions = {}
    for package in packages:
        deb = sorted(debs.glob(f"{package}_*.deb"))[-1]
        versions[package] = deb.name.split("_")[1].replace("%3a", ":")
        if not (trees / package).is_dir():
            (trees / package).mkdir(parents=True)
            subprocess.run(["dpkg-deb", "-x", str(deb), str(trees / package)], check=True)
    return versions


def write(documents: Sequence[Document], folder: Path) -> dict[str, dict[str, Any]]:
    """Files of each kind, and their sizes and hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, dict[str, Any]] = {}
    for kind in (*KINDS, *COMPANIONS):
        for part in ("train", "heldout"):
            chosen = [d for d in documents if d.kind == kind and held_out(d) == (part == "heldout")]
            if part == "train":
                chosen = within_size(chosen)
            data = "".join(json.dumps({"name": d.name, "text": d.text}, ensure_ascii=False) + "\n" for d in chosen)
            (folder / f"{kind}.{part}.jsonl").write_text(data, encoding="utf-8")
            facts[f"{kind}.{part}"] = {
                "documents": len(chosen),
                "bytes": sum(len(d.text.encode()) for d in chosen),
                "sha256": hashlib.sha256(data.encode()).hexdigest(),
            }
    return facts


def read(folder: Path, kind: str, part: str) -> list[Document]:
    """The documents that `write` wrote: `part` is "train" or "heldout"."""
    with open(folder / f"{kind}.{part}.jsonl", encoding="utf-8") as lines:
        return [Document(kind, **json.loads(line)) for line in lines]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="mlx_npumoe.benchmarks.demo_model.corpus", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="Packages and the corpus go here.")
    args = parser.parse_args(argv)
    try:
        versions = fetch(args.work)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"The packages could not be fetched: {error}. A Debian machine with network is needed.", file=sys.stderr)
        return 1
    found = list(documents(args.work / "tree"))
    kept = list(without_near_duplicates(found))
    files = write(kept, args.work / "corpus")
    packages = {s.package: {"version": versions[s.package], "kind": s.kind, "licence": s.licence} for s in SOURCES}
    facts = {"packages": packages, "files": files}
    (args.work / "corpus" / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    before = {k: sum(len(d.text.encode()) for d in found if d.kind == k) for k in (*KINDS, *COMPANIONS)}
    for kind, size in before.items():
        train, held = files[f"{kind}.train"], files[f"{kind}.heldout"]
        print(
            f"{kind:11s} {size / 1e6:6.1f} MB found, {train['bytes'] / 1e6:6.2f} MB in {train['documents']} documents "
            f"kept, {held['bytes'] / 1e3:7.0f} kB in {held['documents']} held out"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
