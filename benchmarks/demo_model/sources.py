"""Documents out of unpacked Debian packages, by kind. Knows where each package keeps its text; selects nothing."""

from __future__ import annotations

import gzip
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .cleaning import html_text, is_english, overstrikes_removed, rst_text, tidy
from .selection import Document

SYNSETS_A_DOCUMENT = 50
RENDERER = "mandoc"  # the package whose program renders manual pages


@dataclass(frozen=True)
class Source:
    """One package: the kind its text counts as, its licence, and how its documents are read from its unpacked tree."""

    kind: str
    package: str
    licence: str
    read: Callable[[Path], Iterable[tuple[str, str]]]  # tree -> (name, text)


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")


def files(pattern: str, clean: Callable[[str], str], skip: str = r"$^") -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A reader of every file that a glob finds, each named by its path below the glob's fixed part; not `skip`."""
    folder = re.match(r"([^*]*)/", pattern)
    assert folder is not None

    def read(tree: Path) -> Iterator[tuple[str, str]]:
        for path in sorted(tree.glob(pattern)):
            name = str(path.relative_to(tree / folder[1]))
            if path.is_file() and not path.is_symlink() and not re.search(skip, name):
                yield name, clean(_read(path))

    return read


def handbook_page(page: str) -> str:
    """A page of the handbook, without the line that every one begins with."""
    return html_text(page).removeprefix("Download the ebook\n\n")


def manual_pages(tree: Path) -> Iterator[tuple[str, str]]:
    """English manual pages, rendered 78 wide."""
    program = tree.parent / RENDERER / "usr/bin/mandoc"
    for path in sorted(tree.glob("usr/share/man/man*/*.gz")):
        page = gzip.decompress(path.read_bytes())
        if path.is_symlink() or page.startswith(b".so "):  # another page's second name
            continue
        made = subprocess.run(
            [str(program), "-T", "utf8", "-O", "indent=4,width=78"], input=page, capture_output=True, check=False
        )
        yield path.name.removesuffix(".gz"), overstrikes_removed(made.stdout.decode("utf-8", "replace"))


def wordnet_glosses(tree: Path) -> Iterator[tuple[str, str]]:
    """`word, word (n.): gloss`, 50 neighbouring synsets a document."""
    for part in ("noun", "verb", "adj", "adv"):
        lines = _read(tree / f"usr/share/wordnet/data.{part}").splitlines()
        synsets = [line for line in lines if not line.startswith("  ")]  # the licence is indented
        for start in range(0, len(synsets), SYNSETS_A_DOCUMENT):
            entries = []
            for line in synsets[start : start + SYNSETS_A_DOCUMENT]:
                data, gloss = line.split(" | ", 1)
                fields = data.split(" ")
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                names = ", ".join(re.sub(r"\((a|p|ip)\)$", "", w).replace("_", " ") for w in words)
                entries.append(f"{names} ({part}): {gloss.strip()}")
            yield f"{part}-{synsets[start][:8]}", tidy("\n\n".join(entries))


def gcide_entries(tree: Path) -> Iterator[tuple[str, str]]:
    """Dictionary entries in the order of the book; entries whose first three letters agree are one document."""
    folder = tree / "usr/share/dictd"
    book = gzip.decompress((folder / "gcide.dict.dz").read_bytes())
    spans = set()
    for line in (folder / "gcide.index").read_text("utf-8", "replace").splitlines():
        word, offset, length = line.rsplit("\t", 2)
        if not word.startswith("00"):  # what dictd itself keeps there
            spans.add((_number(offset), _number(length)))
    entries: dict[str, list[str]] = {}
    end = 0
    for first, size in sorted(spans):
        if first < end:  # an entry inside the one before
            continue
        end = first + size
        entry = tidy(book[first:end].decode("utf-8", "replace"))
        letters = re.sub(r"[^a-z]", "", entry.split("\n", 1)[0].lower())[:3]
        entries.setdefault(letters or "other", []).append(entry)
    for letters, found in sorted(entries.items()):
        yield letters, "\n".join(found)


def _number(digits: str) -> int:
    """A number of a dictd index: base 64, most significant digit first."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = 0
    for digit in digits:
        value = value * 64 + alphabet.index(digit)
    return value


NOT_TEXT = r"(^|/)(genindex|bookindex|search|py-modindex|index)\.html$"
SOURCES = (
    Source(
        "handbook",
        "debian-handbook",
        "GPL-2+ or CC-BY-SA-3.0+",
        files("usr/share/doc/debian-handbook/html/en-US/*.html", handbook_page, NOT_TEXT),
    ),
    Source(
        "python",
        "python3.11-doc",
        "PSF-2.0",
        files("usr/share/doc/python3.11/html/_sources/**/*.rst.txt", rst_text),
    ),
    Source("git", "git-doc", "GPL-2", files("usr/share/doc/git-doc/**/*.txt", tidy)),
    Source(
        "postgresql",
        "postgresql-doc-15",
        "PostgreSQL",
        files("usr/share/doc/postgresql-doc-15/html/*.html", html_text, NOT_TEXT),
    ),
    Source(
        "kernel",
        "linux-doc-6.1",
        "GPL-2",
        files("usr/share/doc/linux-doc-6.1/html/_sources/**/*.rst.txt", rst_text, r"(^|/)translations/"),
    ),
    Source("wordnet", "wordnet-base", "WordNet", wordnet_glosses),
    Source("gcide", "dict-gcide", "GPL-3+", gcide_entries),
    *(
        Source("manual", package, licence, manual_pages)
        for package, licence in (
            ("manpages", "GPL-2+, BSD, MIT and others, by page"),
            ("manpages-dev", "GPL-2+, BSD, MIT and others, by page"),
            ("glibc-doc", "GPL-2+ and GFDL-1.3"),
            ("coreutils", "GPL-3+"),
            ("util-linux", "GPL-2+ and others, by page"),
            ("bash", "GPL-3+"),
            ("iproute2", "GPL-2"),
            ("systemd", "LGPL-2.1+"),
            ("libssl-doc", "Apache-2.0"),
            ("perl-doc", "Artistic or GPL-1+"),
        )
    ),
    # Trained on with the handbook, whose subject they share; no figure of theirs counts.
    Source(
        "debian", "debian-reference-en", "GPL-2+", files("usr/share/debian-reference/*.en.html", html_text, NOT_TEXT)
    ),
    Source("debian", "maint-guide", "GPL-2+", files("usr/share/doc/maint-guide/html/*.en.html", html_text, NOT_TEXT)),
    Source(
        "debian", "developers-reference", "GPL-2+", files("usr/share/developers-reference/*.html", html_text, NOT_TEXT)
    ),
    Source("debian", "debian-faq", "GPL-2+", files("usr/share/doc/debian/FAQ/*.html", html_text, NOT_TEXT)),
    Source("debian", "debian-policy", "GPL-2+", files("usr/share/doc/debian-policy/*.txt.gz", tidy)),
)
KINDS = ("handbook", "python", "git", "postgresql", "kernel", "manual", "wordnet", "gcide")
COMPANIONS = ("debian",)  # kinds that are trained on and not measured


def documents(trees: Path) -> Iterator[Document]:
    """Every English document of every source, from `trees/PACKAGE`."""
    for source in SOURCES:
        for name, text in source.read(trees / source.package):
            if is_english(text):
                yield Document(source.kind, f"{source.package}/{name}", text)
