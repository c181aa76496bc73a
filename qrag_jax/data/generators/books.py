"""Reads books as sentences and splits the books of a folder into training and dev books."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import sentencex

from qrag_jax.data.files.records import read_text, text_files
from qrag_jax.data.sample import Split
from qrag_jax.errors import InputError

# Dev's share of a folder's sentences. It is more than half: training documents have tens of
# sentences, but scored documents have tens of thousands of different ones.
DEV_SHARE = 0.6
# The splitter treats a quotation as one sentence, so quotation marks are removed. It must not see
# single marks either: after an elision ("'gan", "'tis") it would search pages for the closing mark.
# Single marks at the end of a sentence are removed, since they would begin the next sentence.
_QUOTATION_MARKS = re.compile(r"""["“”]|(?<=[.!?])['’](?=["“”\s]|$)""")
_HIDDEN = str.maketrans("'‘’", "ʼʻʽ")
_SHOWN = str.maketrans("ʼʻʽ", "'‘’")


@dataclasses.dataclass(frozen=True, eq=False)
class Book:
    """One file of a folder: its name, and its sentences in order."""

    name: str
    sentences: list[str]


def sentences_of(text: str) -> list[str]:
    """The sentences of an English text, without double quotation marks, white space collapsed.

    Single marks stay, except at the end of a sentence. Sentences without a letter are left out.
    """
    parts = sentencex.segment("en", _QUOTATION_MARKS.sub("", text).translate(_HIDDEN))
    sentences = (" ".join(part.translate(_SHOWN).split()) for part in parts)
    return [sentence for sentence in sentences if any(map(str.isalpha, sentence))]


def read_books(folder: str, field: str) -> tuple[Book, ...]:
    """The books of a folder that have at least one sentence, sorted by name.

    The result is cached: it is the same object as long as no file changes.

    Args:
        folder: the folder of `*.txt` and `*.txt.gz` files.
        field: the config field that names the folder, for messages.
    """
    files = text_files(Path(folder))
    if not files:
        raise InputError(
            f"the noise folder {folder} has no books; put .txt or .txt.gz files there, or set "
            f'{field}="" to do without it.'
        )
    stats = [file.stat() for file in files]
    stamp = tuple((f.name, s.st_mtime_ns, s.st_size) for f, s in zip(files, stats, strict=True))
    return _read(folder, stamp)


def split_books(books: Sequence[Book], split: Split) -> list[Book]:
    """The books of one split. Books stay whole; dev gets about `DEV_SHARE` of all sentences.

    From the longest book to the shortest, each book goes to the split that is further below its
    share. If there are at least two books, each split gets at least one.
    """
    sizes: dict[Split, int] = {"train": 0, "dev": 0}
    parts: dict[Split, list[Book]] = {"train": [], "dev": []}
    for book in sorted(books, key=lambda book: (-len(book.sentences), book.name)):
        dev_lacks = sizes["dev"] * (1 - DEV_SHARE) <= sizes["train"] * DEV_SHARE
        part: Split = "dev" if dev_lacks else "train"
        sizes[part] += len(book.sentences)
        parts[part].append(book)
    return sorted(parts[split], key=lambda book: book.name)


@functools.lru_cache(maxsize=4)
def _read(folder: str, stamp: tuple[tuple[str, int, int], ...]) -> tuple[Book, ...]:
    books = [Book(name, sentences_of(read_text(Path(folder) / name))) for name, _, _ in stamp]
    if not any(book.sentences for book in books):
        raise InputError(f"the books in the noise folder {folder} have no sentence; add others.")
    return tuple(book for book in books if book.sentences)
