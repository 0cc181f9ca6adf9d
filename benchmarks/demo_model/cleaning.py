"""Plain text out of documentation pages (HTML, manual pages, reStructuredText). Knows no package and no file."""

from __future__ import annotations

import re
import unicodedata
from html.parser import HTMLParser

# An element of these classes is navigation, not text.
NAVIGATION = frozenset(
    ("navheader", "navfooter", "docnav", "toc", "headerlink", "sphinxsidebar", "related", "footer", "navbar", "banner")
)
SKIPPED_TAGS = frozenset(("head", "script", "style", "nav", "svg"))
VOID_TAGS = frozenset(("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"))
BLOCK_TAGS = frozenset(
    ("address", "blockquote", "body", "dd", "div", "dl", "dt", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "li", "ol")
) | frozenset(("p", "pre", "section", "table", "tr", "ul"))
TIGHT_TAGS = frozenset(("li", "dd", "tr"))  # start on a new line, without an empty one before


class _Text(HTMLParser):
    """Collects the text of one page: paragraphs apart by an empty line, `pre` as it is, one line a table row."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[tuple[str, bool]] = []  # (tag, whether it and what is inside it is skipped)
        self.pre = 0

    @property
    def skipping(self) -> bool:
        return bool(self.open) and self.open[-1][1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID_TAGS:
            if tag == "br" and not self.skipping:
                self.parts.append("\n")
            return
        classes = set((dict(attrs).get("class") or "").split())
        self.open.append((tag, self.skipping or tag in SKIPPED_TAGS or bool(classes & NAVIGATION)))
        if self.skipping:
            return
        if tag in BLOCK_TAGS:
            self._block("\n" if tag in TIGHT_TAGS else "\n\n")
        if tag == "li":
            self.parts.append("* ")
        if tag == "pre":
            self.pre += 1

    def handle_endtag(self, tag: str) -> None:
        if not any(name == tag for name, _ in self.open):
            return
        while True:  # unclosed elements inside end here too
            name, skipped = self.open.pop()
            if not skipped:
                if name == "pre":
                    self.pre -= 1
                if name in ("td", "th"):
                    self.parts.append("  ")
                elif name in BLOCK_TAGS:
                    self._block("\n" if name in TIGHT_TAGS else "\n\n")
            if name == tag:
                return

    def _block(self, border: str) -> None:
        """Start a new line or paragraph; a bullet keeps the paragraph that it opens beside it."""
        if self.parts and self.parts[-1] == "* ":
            return
        self.parts.append(border)

    def handle_data(self, data: str) -> None:
        if self.skipping:
            return
        if self.pre:
            self.parts.append(data)
            return
        text = re.sub(r"\s+", " ", data)
        if text == " " and (not self.parts or self.parts[-1].endswith(("\n", " "))):
            return
        if self.parts and self.parts[-1].endswith(("\n", "* ")):
            text = text.lstrip()
        self.parts.append(text)


def html_text(page: str) -> str:
    """The readable text of an HTML page."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return tidy("".join(parser.parts))


def overstrikes_removed(page: str) -> str:
    """A manual page as a terminal program writes it, without the backspaces that stand for bold and underlined."""
    return tidy(re.sub(".\b", "", page))


def rst_text(page: str) -> str:
    """reStructuredText as it is, without comments and licence lines at its head."""
    return tidy(re.sub(r"\A(\.\. (SPDX|include).*\n+|\s*\n)+", "", page))


def tidy(text: str) -> str:
    """NFC, tabs as spaces, no spaces at ends of lines, at most one empty line in a row, one newline at the end."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\u00a0", " ").replace("\u00ad", "")
    text = "".join(c for c in text.expandtabs(8) if c == "\n" or unicodedata.category(c) != "Cc")
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def is_english(text: str, share: float = 0.97) -> bool:
    """Whether at least `share` of the characters are ASCII: leaves translations out."""
    return bool(text.strip()) and sum(map(str.isascii, text)) >= share * len(text)
