"""Files of rankings and of judgements: TREC's runs and qrels, and the tab-separated ones of BEIR.

A line of a run is `query Q0 document rank score tag`, a line of TREC's qrels `query 0 document
relevance`, with blanks or tabs between; https://github.com/usnistgov/trec_eval. BEIR's qrels
(Thakur et al., 2021) have the header `query-id<TAB>corpus-id<TAB>score`. A file that is read may be
gzip'd; its name then ends in `.gz`.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from qrag_jax.errors import InputError
from qrag_jax.runtime import whole_files
from qrag_jax.runtime.whole_files import write_whole

BEIR_HEADER = "query-id\tcorpus-id\tscore"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


def write_run(path: Path, run: Mapping[str, Mapping[str, float]], tag: str = "qrag") -> None:
    """Writes rankings as a TREC run. Queries without documents have no lines.

    Args:
        run: query → document → score, best first.
    """
    _check_names(path, tag)
    lines = []
    for query, scores in run.items():
        _check_names(path, query, *scores)
        for rank, (document, score) in enumerate(scores.items(), 1):
            lines.append(f"{query} Q0 {document} {rank} {score!r} {tag}\n")
    write_whole(path, "".join(lines))


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Judgements of TREC's form, or of BEIR's if the file begins with its header.

    Returns:
        query → document → relevance, in the file's order.
    """
    qrels: dict[str, dict[str, int]] = {}
    columns, form = 4, "'query 0 document relevance', or begin the file with BEIR's header"
    for number, (place, line) in enumerate(_lines(path)):
        if number == 0 and line == BEIR_HEADER:
            columns, form = 3, "'query<TAB>document<TAB>score'"
            continue
        fields = line.split("\t") if columns == 3 else line.split()
        if len(fields) != columns or not all(fields):
            raise InputError(f"{place}: does not have {columns} columns; write {form}")
        query, document, relevance = fields[0], fields[-2], fields[-1]
        if not _WHOLE_NUMBER.fullmatch(relevance):
            raise InputError(
                f"{place}: the relevance {relevance!r} is not a whole number; write one"
            )
        of_query = qrels.setdefault(query, {})
        if of_query.setdefault(document, int(relevance)) != int(relevance):
            raise InputError(
                f"{place}: document {document} has another relevance for query {query} in an "
                "earlier line; keep one of them"
            )
    if not qrels:
        raise InputError(f"{path} holds no judgement; write one a line")
    return qrels


def write_qrels(path: Path, qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Writes judgements in TREC's form."""
    lines = []
    for query, judged in qrels.items():
        _check_names(path, query, *judged)
        lines += [f"{query} 0 {document} {grade}\n" for document, grade in judged.items()]
    write_whole(path, "".join(lines))


def _check_names(path: Path, *names: str) -> None:
    for name in names:
        if name.split() != [name]:
            raise InputError(
                f"{path} cannot hold the name {name!r}: it is empty or has white space in it; "
                "rename it"
            )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Pairs (place, line) of the lines that are not blank, without their ends."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as opened:
            file = cast(BinaryIO, opened)
            for number, line in enumerate(
                whole_files.bounded_lines(file, path, "write it anew"), 1
            ):
                place = f"{path}, line {number}"
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    text = line.decode().rstrip("\r\n")
                except UnicodeDecodeError:
                    raise InputError(f"{place}: is not UTF-8; save the file as UTF-8") from None
                if text.strip():
                    yield place, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is not sound gzip ({error}); download it again") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); give a file that can"
        ) from None
