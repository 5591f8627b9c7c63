"""The code blocks of README.md and docs/, for test_docs.py and for the ranks that run them."""

import pathlib
import re
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r'^( *)```(\w*)(?: title="([^"]*)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)


class Block(typing.NamedTuple):
    """A code block.

    Attributes:
        place: Where it is, FILE:LINE.
        language: "python", "sh" or, of what a program prints, "".
        title: The file that it is, or "".
        text: What it says.
    """

    place: str
    language: str
    title: str
    text: str


def blocks(name):
    """Returns the `Block`s of a page, named relative to the repository."""
    page = (ROOT / name).read_text(encoding="utf-8")
    return [Block(f"{name}:{page.count(chr(10), 0, match.start()) + 1}", match[2], match[3] or "", match[4])
            for match in _BLOCK.finditer(page)]


def all_blocks(language):
    """Returns the `Block`s of a language on all pages that people write."""
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md")))]
    return [block for page in pages for block in blocks(page) if block.language == language]
