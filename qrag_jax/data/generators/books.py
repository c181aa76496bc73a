"""Books as sentences, and which books of a folder are for training and which for dev."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import sentencex

from qrag_jax.data.files.text_files import read_text, text_files
from qrag_jax.data.generators.synthetic import Split
from qrag_jax.errors import InputError

# Of a folder's sentences. More than half: documents are trained on at tens of sentences and scored
# at tens of thousands, each of them another one.
DEV_SHARE = 0.6
# The splitter takes what is between quotation marks for one sentence. It must not see single ones
# either: after an elision ("'gan", "'tis") it would look for the closing one for pages. Those that
# end a sentence are left out, since else they would begin the next one.
_QUOTATION_MARKS = re.compile(r"""["“”]|(?<=[.!?])['’](?=["“”\s]|$)""")
_HIDDEN = str.maketrans("'‘’", "ʼʻʽ")
_SHOWN = str.maketrans("ʼʻʽ", "'‘’")


@dataclasses.dataclass(frozen=True, eq=False)
class Book:
    """One file of a folder: its name, and its sentences in order."""

    name: str
    sentences: list[str]


def sentences_of(text: str) -> list[str]:
    """The sentences of an English text without quotation marks, white space collapsed.

    Single marks stay but at the end of a sentence. What has no letter is left out.
    """
    parts = sentencex.segment("en", _QUOTATION_MARKS.sub("", text).translate(_HIDDEN))
    sentences = (" ".join(part.translate(_SHOWN).split()) for part in parts)
    return [sentence for sentence in sentences if any(map(str.isalpha, sentence))]


def read_books(folder: str, field: str) -> tuple[Book, ...]:
    """The books of a folder that have a sentence, by name.

    The same object as long as no file changes.

    Args:
        folder: of `*.txt` and `*.txt.gz`.
        field: of the config that names the folder, for messages.

    Raises:
        InputError: the folder has no books or not a sentence, or a book cannot be read.
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
    """The books of one split: whole books, `DEV_SHARE` of all sentences in dev, or about that.

    From the longest book down, each goes to the split that lacks most. At least one book each if
    there are two.
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
