"""Files of rankings and of judgements: TREC's runs and qrels, and the tab-separated ones of BEIR.

A line of a run is `query Q0 document rank score tag`, a line of TREC's qrels `query 0 document
relevance`, with blanks or tabs between; https://github.com/usnistgov/trec_eval. BEIR's qrels
(Thakur et al., 2021) have the header `query-id<TAB>corpus-id<TAB>score`. Every file may be gzip'd;
its name then ends in `.gz`.
"""

from __future__ import annotations

import codecs
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.whole_files import replacing

BEIR_HEADER = "query-id\tcorpus-id\tscore"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """The rankings of a TREC run: query → document → score, best first.

    Scores give the order, as in trec_eval, and not the ranks; documents of equal scores keep the
    order of their lines (trec_eval would order them by name, descending). A run without a line is
    one without hits.
    """
    found: dict[str, dict[str, float]] = {}
    for place, line in _lines(path):
        fields = line.split()
        if len(fields) != 6:
            raise InputError(
                f"{place}: has {len(fields)} columns instead of 6; write "
                "'query Q0 document rank score tag'"
            )
        query, _, document, rank, score, _ = fields
        if not _WHOLE_NUMBER.fullmatch(rank):
            raise InputError(f"{place}: the rank {rank!r} is not a whole number; write one")
        try:
            value = float(score)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InputError(f"{place}: the score {score!r} is not a finite number; write one")
        of_query = found.setdefault(query, {})
        if document in of_query:
            raise InputError(
                f"{place}: document {document} is listed for query {query} again; keep one line"
            )
        of_query[document] = value
    return {
        query: dict(sorted(scores.items(), key=lambda item: -item[1]))
        for query, scores in found.items()
    }


def write_run(path: Path, run: Mapping[str, Mapping[str, float]], tag: str = "qrag") -> None:
    """Writes rankings as a TREC run; `read_run` gives them back with the same scores.

    Queries without documents have no lines.

    Args:
        path: the file, replaced as a whole.
        run: query → document → score, best first.
        tag: name of the run.

    Raises:
        OSError: the file cannot be written.
    """
    _check_names(path, tag)
    lines = []
    for query, scores in run.items():
        _check_names(path, query, *scores)
        last = math.inf
        for rank, (document, score) in enumerate(scores.items(), 1):
            if not math.isfinite(score) or score > last:
                raise InputError(
                    f"{path} cannot hold the ranking of query {query}: the score of document "
                    f"{document} is {score}; give finite scores, the highest first"
                )
            last = float(score)
            lines.append(f"{query} Q0 {document} {rank} {last!r} {tag}\n")
    _write(path, lines)


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Judgements of TREC's form, or of BEIR's if the file begins with its header.

    Returns:
        query → document → relevance, in the file's order.
    """
    found: dict[str, dict[str, int]] = {}
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
        of_query = found.setdefault(query, {})
        if of_query.setdefault(document, int(relevance)) != int(relevance):
            raise InputError(
                f"{place}: document {document} has another relevance for query {query} in an "
                "earlier line; keep one of them"
            )
    if not found:
        raise InputError(f"{path} holds no judgement; write one a line")
    return found


def write_qrels(path: Path, qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Writes judgements: in BEIR's form if the name ends in `.tsv` or `.tsv.gz`, else in TREC's.

    Raises:
        OSError: the file cannot be written.
    """
    beir = path.name.removesuffix(".gz").endswith(".tsv")
    lines = [f"{BEIR_HEADER}\n"] if beir else []
    for query, judged in qrels.items():
        _check_names(path, query, *judged, blanks=beir)
        for document, relevance in judged.items():
            fields = (query, document) if beir else (query, "0", document)
            lines.append(("\t" if beir else " ").join((*fields, f"{int(relevance)}\n")))
    _write(path, lines)


def _check_names(path: Path, *names: str, blanks: bool = False) -> None:
    for name in names:
        parts = re.split(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", name) if blanks else name.split()
        if parts != [name] or not name.strip():
            raise InputError(
                f"{path} cannot hold the name {name!r}: it is empty or has white space in it; "
                "rename it"
            )


def _write(path: Path, lines: list[str]) -> None:
    data = "".join(lines).encode()
    with replacing(path) as file:
        file.write(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Pairs (place, line) of the lines that are not blank, without their ends."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as opened:
            file = cast(BinaryIO, opened)
            for number, line in enumerate(bounded_files.lines(file, path, "write it anew"), 1):
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
