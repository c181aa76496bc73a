"""Reads judged queries of the usual formats, and finds gold passages of a corpus by their text.

- A folder in BEIR's layout (`data.corpora`).
- A file of rows (`data.corpora`), `.json` or `.jsonl`, gzip'd or not, or a folder with
  such a file for each split.
"""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from qrag_jax.data import corpora
from qrag_jax.data.corpora import Query, judged_row, read_qrels
from qrag_jax.data.reading import WITHOUT, DatasetPart, ReadReport, parse_parts
from qrag_jax.data.records import read_records, split_files
from qrag_jax.data.sample import Page, letters
from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Corpus, Passage

_WORD = re.compile(r"\w+")
_LONGEST = 40  # letters of an id before the hash
_DIGITS = 8  # of the hash, in hex
NO_DOCUMENT, NO_TEXT = "queries without a relevant document", "judged queries without a text"


def read_judged_queries(text: str) -> tuple[list[Query], list[ReadReport]]:
    """The queries of a dataset string, and for each part the report of what was skipped.

    Skipped are queries without a relevant document, and judgements of queries that have no text. A
    slice is of all queries of the part, whether they are skipped or not.

    Args:
        text: `path,split;path,split`, see `data.reading`. A path is a file or a folder of
            this machine; of a file, the split may only give a slice, such as train[:100].
    """
    parts = [_read(part) for part in parse_parts(text, WITHOUT)]
    found = [query for read, _ in parts for query in read]
    for name, times in collections.Counter(query.id for query in found).items():
        if times > 1:
            raise InputError(
                f"the query {name!r} is there twice; give each its own 'id', and name parts that "
                "do not overlap."
            )
    return found, [report for _, report in parts]


def _read(part: DatasetPart) -> tuple[list[Query], ReadReport]:
    path = Path(part.path).expanduser()
    if path.is_dir() and corpora.is_collection(path):
        files, read = _collection(path, part.split)
    else:
        files = split_files(path, part.split, (f"{part.split}.jsonl",))
        rows = (row for file in files for row in read_records(file))
        read = [(where, judged_row(where, row)) for where, row in rows]
    if part.bounds:
        read = [read[place] for place in part.of(len(read))]
    report = ReadReport(part.path, tuple(map(str, files)), read=len(read))
    kept = []
    for where, query in read:
        if not query.grades:
            report.count(report.skipped, NO_DOCUMENT, where)
        elif not query.text:
            report.count(report.skipped, NO_TEXT, where)
        else:
            kept.append(query)
    report.kept = len(kept)
    if not kept:
        raise InputError(
            f"{part.path} has no usable query among {report.read} (skipped: {report.losses()}); "
            "give the judgements of these queries."
        )
    return kept, report


Placed = list[tuple[str, Query]]  # (where it is, the query)


def _collection(folder: Path, split: str) -> tuple[list[Path], Placed]:
    """The queries of a split: those of its own file, and those that are judged."""
    asked, judgements = corpora.queries_path(folder, split), corpora.qrels_path(folder, split)
    texts, qrels = corpora.read_queries(folder, split), read_qrels(judgements)
    own = asked.name.startswith(f"queries_{split}.")
    read: Placed = []
    for name in dict.fromkeys([*(texts if own else ()), *qrels]):
        judged = qrels.get(name, {})
        grades = tuple((each, grade) for each, grade in judged.items() if grade >= 1)
        where = f"{asked.name}: {name}"
        read.append((where, Query(name, texts.get(name, "").strip(), grades)))
    return [asked, judgements], read


# ---------------------------------------------------------------------- passages by their text


def names_of(corpus: Corpus, texts: Iterable[str]) -> dict[str, str]:
    """The ids of the passages that have these texts, by text; the others are left out.

    Data sets write one passage in several ways ("Title. Text", "Title Text"), so letters and digits
    alone are compared. Of passages with the same ones the first counts. All passages are read.
    """
    wanted: dict[str, list[str]] = {}
    for text in set(texts):
        wanted.setdefault(letters(text), []).append(text)
    found: dict[str, str] = {}
    for passage in corpus if wanted else ():
        for text in wanted.pop(letters(passage.whole), ()):
            found[text] = passage.name
        if not wanted:
            break
    return found


def pooled(pages: Iterable[Page]) -> list[Passage]:
    """The different passages, in the order in which they come."""
    found: dict[tuple[str, str], Passage] = {}
    for page in pages:
        # A page without letters is distinguished from others by its marks.
        key = (letters(page.title), letters(page.text)) if letters(page.whole) else page[:2]
        if key in found:
            continue
        words = "-".join(_WORD.findall((page.title or page.text).casefold()))[:_LONGEST]
        digest = hashlib.blake2b(f"{page.title}\0{page.text}".encode(), digest_size=_DIGITS // 2)
        name = f"{words.rstrip('-')}-{digest.hexdigest()}".lstrip("-")
        found[key] = Passage(name, page.text, page.title)
    return [*found.values()]
