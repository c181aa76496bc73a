"""Corpora of passages; files of queries, with judgements; rankings.

- Passages are records of any field names. By itself a reader finds `id`, `title` and `text`; BEIR's
  `_id`; `doc_id`, as remakes of DeepRetrieval have it; and `contents` of the corpus wiki18_100w
  (FlashRAG, arXiv 2405.13576): a title in double quotes on a line of its own, then the text.
- BEIR's layout (Thakur et al., 2021): `queries.jsonl`, lines `{"_id", "text"}`, and the judgements
  of a split in `qrels/SPLIT.tsv` or `qrels_SPLIT.tsv`, tab-separated below a header. A split may
  have queries of its own, `queries_SPLIT.jsonl`. Each file may be gzip'd.
- TREC's runs, lines `query Q0 document rank score tag`, and qrels, lines `query 0 document
  relevance`, with blanks or tabs between; https://github.com/usnistgov/trec_eval.
- Rows of judged queries. DeepRetrieval (arXiv 2503.00223) searches publications for a review:
  `pico`, an object with the parts P (patient), I (intervention), C (comparison) and O (outcome) of
  what the review asks; `publication_pmids`, the publications that it uses; `pub_date`, its date.
  Rows of the remake have `query` and `relevant_doc_ids`, even if they have a `pico`, and perhaps
  `answers`. Both may have an `id`. Ids are texts or whole numbers.
- Lists of queries without judgements, see `read_query_list`.
"""

from __future__ import annotations

import calendar
import contextlib
import dataclasses
import datetime
import decimal
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from qrag_jax.data import records
from qrag_jax.data.reading import DatasetPart, ReadReport, usable
from qrag_jax.data.records import ITEMS, SUFFIXES, TEXT, read_lines, read_records, split_files
from qrag_jax.data.sample import BadRecord, Passage, Sample
from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import write_whole

# ---------------------------------------------------------------- corpora

NAMES, TITLE, TEXTS = ("_id", "id", "doc_id"), "title", ("text", CONTENTS := "contents")
METADATA = "metadata"  # a field of this name that holds an object is spread out
ALL = "*"


@dataclasses.dataclass(frozen=True)
class Columns:
    id: str | None = None  # None: the first of `NAMES` that the first record has
    # Records may lack it; None: `TITLE`, or else their `contents` have it; "": there are no titles
    title: str | None = None
    text: str | None = None  # None: the first of `TEXTS` that the first record has
    metadata: tuple[str, ...] | None = None  # the further fields that are kept; None: all

    @classmethod
    def parse(cls, columns: str = "", metadata: str = ALL) -> Columns:
        """The columns of flags such as "id=docid,title=name,text=body", and "year,url" or "*"."""
        fields = records.named_columns(columns, ("id", "title", "text"), ("title",))
        kept = None if metadata == ALL else tuple(filter(None, metadata.split(",")))
        return cls(**fields, metadata=kept)

    def of(self, record: Mapping[str, Any], where: str) -> Columns:
        """The columns with the names of ids and texts settled by the first record."""
        settled: dict[str, Any] = {}
        for kind, column, usual in (("id", self.id, NAMES), ("text", self.text, TEXTS)):
            names = usual if column is None else (column,)
            settled[kind] = next((name for name in names if name in record), None)
            if settled[kind] is None:
                raise InputError(
                    f"{where}: there is no field {' or '.join(map(repr, names))}, only "
                    f"{', '.join(map(repr, record))}; give qrag index --columns={kind}=NAME."
                )
        return dataclasses.replace(self, **settled)


def corpus_files(path: Path) -> list[Path]:
    """The files of a corpus, in reading order.

    The path is a file, a folder with `corpus.jsonl`, gzip'd or not, or a folder of other files.
    """
    for file in (path, path / "corpus.jsonl", path / "corpus.jsonl.gz"):
        if file.is_file():
            return [file]
    if not path.exists():
        raise InputError(f"{path} does not exist; give a corpus' file or folder.")
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(SUFFIXES))
    if not files:
        raise InputError(f"{path} has no corpus.jsonl and no {', '.join(SUFFIXES)}; put one there.")
    return files


def read_corpus(path: Path, columns: Columns | None = None) -> Iterator[tuple[str, Passage]]:
    """Yields place, such as "corpus.jsonl.gz:17", and passage of a corpus, in the files' order.

    Ids that are whole numbers become texts, titles and texts that are null empty ones, and in
    further fields times become ISO texts, and NaN null. Two documents may have one id.
    """
    columns = columns or Columns()
    titled = not columns.title
    for file in corpus_files(path):
        settled = None
        for where, record in read_records(file):
            settled = settled or columns.of(record, where)
            titled = titled or columns.title in record
            yield where, _document(where, record, settled)
    if not titled:
        raise InputError(f"{path}: no record has {columns.title!r}; see --columns.")


def _document(where: str, record: Mapping[str, Any], columns: Columns) -> Passage:
    assert columns.id is not None
    assert columns.text is not None
    name = record.get(columns.id)
    name = str(name) if type(name) is int else _text(where, record, columns.id)
    if not name.strip():
        raise InputError(f"{where}: field {columns.id!r} is empty; give every passage its own id.")
    text = _text(where, record, columns.text)
    title, column = "", TITLE if columns.title is None else columns.title
    if column and record.get(column) is not None:
        title = _text(where, record, column)
    elif columns.title is None and columns.text == CONTENTS:
        title, text = split_contents(text)
    read = (columns.id, column, columns.text)
    further = {key: value for key, value in record.items() if key not in read}
    spread = further.get(METADATA)
    if isinstance(spread, Mapping):
        del further[METADATA]
        further |= spread
    elif spread is None:  # as in many files of BEIR's layout
        further.pop(METADATA, None)
    if columns.metadata is not None:
        further = {key: further[key] for key in columns.metadata if key in further}
    kept = {key: _as_json(f"{where}: field {key!r}", value) for key, value in further.items()}
    return Passage(name, text, title, kept)


def _as_json(place: str, value: Any) -> Any:
    """A value of a table as JSON has it: times as ISO texts; null for NaN, as pandas writes it."""
    try:
        # Others that JSON has not, such as Infinity, are refused.
        text = json.dumps(value, default=_plain)
        return json.loads(text, parse_constant={"NaN": None}.__getitem__)
    except (AttributeError, ValueError, KeyError, RecursionError):
        raise InputError(
            f"{place} has {str(value)[:40]!r}, which JSON cannot hold; mend it, or see --metadata."
        ) from None


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, decimal.Decimal) else value.isoformat()


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of a `contents`; a first line that is not in double quotes is no title."""
    first, newline, rest = contents.partition("\n")
    first = first.strip()
    if newline and len(first) > 1 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents.removeprefix("\n")


def _text(where: str, record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if value is None and field in record:  # an empty cell, or null
        return ""
    if not isinstance(value, str):
        shown = repr(value)[:80] if field in record else "missing"
        raise InputError(f"{where}: field {field!r} is {shown}, no text; see --columns.")
    return value


# ---------------------------------------------------------------- queries

PARTS = {"P": "Patient", "I": "Intervention", "C": "Comparison", "O": "Outcome"}
_ASKED = ("question", "query", "text")
BEIR_HEADER = "query-id\tcorpus-id\tscore"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


def check_in_corpus(
    queries: Sequence[Sample],
    known_ids: AbstractSet[str],
    max_missing_share: float,
    *,
    field: str,
    corpus: str,
    fix: str,
) -> tuple[list[Sample], str]:
    """The queries of which the corpus has a relevant document, and a line on what it lacks.

    Too many others are refused, by the names of the queries' field and of the corpus. Grades stay,
    so that a document that it lacks is never found.
    """
    kept, dropped = list[Sample](), list[Sample]()
    for query in queries:
        (kept if any(name in known_ids for name, _ in query.grades) else dropped).append(query)
    if not kept or len(dropped) > max_missing_share * len(queries):
        raising = f", or raise config.search.max_missing_share, {max_missing_share}" if kept else ""
        raise InputError(
            f"{field}: {corpus} has no relevant document of {len(dropped)} of {len(queries)} "
            f"queries (the first: {dropped[0].id!r}), as if of another collection; {fix}{raising}."
        )
    none = "queries left out, of which the corpus has no relevant document; the first is"
    parts = [f"{len(dropped)} of {len(queries)} {none} {dropped[0].id}"] if dropped else []
    documents = {document for query in kept for document, _ in query.grades}
    if lacking := len(documents - known_ids):
        kept_ones = "documents that are relevant for the queries that are kept"
        parts.append(f"the corpus lacks {lacking} of the {len(documents)} {kept_ones}")
    return kept, "; ".join(parts)


# ---------------------------------------------------------------- BEIR's layout


def is_collection(folder: Path) -> bool:
    """Whether a folder has queries or judgements of BEIR's layout, so that it should be one."""
    names = ("queries*.jsonl", "queries*.jsonl.gz", "qrels*.tsv", "qrels*.tsv.gz", "qrels/*.tsv*")
    return any(next(folder.glob(name), None) is not None for name in names)


def read_queries(folder: Path, split: str = "") -> dict[str, str]:
    """The queries' texts by `_id`: those of the split if it has a file of its own, else all."""
    return {q.id: q.question for q in read_query_list(queries_path(folder, split))}


def queries_path(folder: Path, split: str = "") -> Path:
    """The file with the queries of a split if it has its own, else the one with those of all."""
    return _one_of(folder, [f"queries_{split}.jsonl"] * bool(split) + ["queries.jsonl"])


def qrels_path(folder: Path, split: str) -> Path:
    """The file with the judgements of a split, such as "test"."""
    return _one_of(folder, [f"qrels/{split}.tsv", f"qrels_{split}.tsv"])


def _one_of(folder: Path, names: list[str]) -> Path:
    for path in (folder / f"{name}{end}" for name in names for end in ("", ".gz")):
        if path.is_file():
            return path
    raise InputError(f"{folder} has no {' or '.join(names)} (or .gz); give a folder of BEIR's form")


# ---------------------------------------------------------------- judgements and rankings


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Judgements, query → document → relevance, of TREC's form, or BEIR's below its header."""
    qrels: dict[str, dict[str, int]] = {}
    columns, form = 4, "'query 0 document relevance', or begin the file with BEIR's header"
    for number, line in read_lines(path):
        place = f"{path}, line {number}"
        if number == 1 and line == BEIR_HEADER:
            columns, form = 3, "'query<TAB>document<TAB>score'"
            continue
        cells = line.split("\t") if columns == 3 else line.split()
        if len(cells) != columns or not all(cells):
            raise InputError(f"{place}: does not have {columns} columns; write {form}")
        query, document, relevance = cells[0], cells[-2], cells[-1]
        if not _WHOLE_NUMBER.fullmatch(relevance):
            raise InputError(f"{place}: the relevance {relevance!r} is no whole number; write one")
        of_query = qrels.setdefault(query, {})
        if of_query.setdefault(document, int(relevance)) != int(relevance):
            raise InputError(f"{place}: {document} has another relevance for {query}; keep one.")
    if not qrels:
        raise InputError(f"{path} holds no judgement; write one a line")
    return qrels


def write_qrels(path: Path, qrels: Mapping[str, Mapping[str, int]]) -> None:
    _write_rows(path, [(q, "0", d, g) for q, judged in qrels.items() for d, g in judged.items()])


def write_run(path: Path, run: Mapping[str, Mapping[str, float]], tag: str) -> None:
    """Writes rankings, query → document → score, best first, as a TREC run."""
    ranked = ((query, enumerate(scores.items(), 1)) for query, scores in run.items())
    _write_rows(path, [(q, "Q0", d, n, s, tag) for q, hits in ranked for n, (d, s) in hits])


def _write_rows(path: Path, rows: Sequence[tuple[str | float, ...]]) -> None:
    lines = []
    for row in rows:
        for name in row:
            if str(name).split() != [str(name)]:
                raise InputError(f"{path}: the name {name!r} is empty or has blanks; change it")
        lines.append(" ".join(map(str, row)) + "\n")
    write_whole(path, "".join(lines))


# ---------------------------------------------------------------- rows of queries


def judged_row(where: str, row: Mapping[str, Any]) -> Sample:
    """One row as a query; its grades are () if it has no relevant document.

    The text of a PICO row is its parts with their names, such as "Patient: adults; Outcome: pain";
    parts that are empty are left out. Where there is only the year or month of a review, documents
    may be found until its end. A row without an id gets one from its place and content.
    """
    with records.refused(where):
        query, plain = _query(row, "query"), row.get("query") is not None
        field = "relevant_doc_ids" if plain else "publication_pmids"
        listed = records.get(row, ITEMS, field)
        documents = tuple(dict.fromkeys(records.identifier(name, field) for name in listed))
        answers = records.get(row, ITEMS, "answers", default=[])
        content = "\0".join((where, query.question, *documents))
        digest = hashlib.blake2b(content.encode(), digest_size=4).hexdigest()
        return dataclasses.replace(
            query,
            id=query.id or f"row-{where.rpartition(':')[2]}-{digest}",
            grades=tuple((document, 1) for document in documents),
            answers=tuple(dict.fromkeys(_line(answer, "answers") for answer in answers)),
        )


def _query(row: Mapping[str, Any], *names: str) -> Sample:
    """A row as a query without judgements: the first of these fields, or else its PICO."""
    name = next((row[key] for key in ("id", "_id") if row.get(key) is not None), None)
    field = next((name for name in (*names, "pico") if row.get(name) is not None), names[0])
    value = records.present(row, field)
    return Sample(
        "" if name is None else records.identifier(name, "id"),
        _pico(value) if field == "pico" else _line(value, field),
        until=_until(row.get("pub_date")),
        collection=records.get(row, TEXT, "collection", default=""),
    )


def _pico(pico: Any) -> str:
    if not isinstance(pico, dict) or not pico.keys() <= PARTS.keys():
        raise BadRecord(f"field 'pico' is no object with {', '.join(PARTS)}")
    parts = {key: _line(pico[key], key) for key in PARTS if pico.get(key) not in (None, "")}
    if not parts:
        raise BadRecord("field 'pico' has no part")
    return "; ".join(f"{PARTS[key]}: {text.rstrip(' .;')}" for key, text in parts.items())


def _line(value: Any, field: str) -> str:
    if not records.checked(value, TEXT, field).strip():
        raise BadRecord(f"field '{field}' has no word")
    return " ".join(value.split())


def _until(value: Any) -> str:
    try:
        return "" if value is None else last_day(str(value))  # a year may be a number
    except ValueError:
        raise BadRecord("field 'pub_date' is no date such as YYYY-MM-DD") from None


_TIME, _ORDINAL = re.compile(r"[T ]\d\d:.*"), re.compile(r"(?<=\d)(st|nd|rd|th)\b")
_FORMS = ("%Y-%m-%d", "%Y%m%d", "%Y-%b-%d", "%d-%b-%Y", "%b-%d-%Y", "%Y-%m", "%Y-%b", "%b-%Y", "%Y")


def last_day(text: str) -> str:
    """The day of a date, or the last day of a month or year, as YYYY-MM-DD.

    Parts are separated by blanks, commas or any of -/. and months may have English names. The year
    comes first where the month is a number: of 7/10/2015 nobody knows what it means.
    """
    plain = re.sub(r"[-/., ]+", "-", _ORDINAL.sub("", _TIME.sub("", text.strip())))
    plain = re.sub(r"[A-Za-z]{3,9}", lambda name: name[0][:3], plain)
    for form in _FORMS if re.search(r"\b[12]\d{3}", plain) else ():
        with contextlib.suppress(ValueError):
            day = datetime.datetime.strptime(plain, form).date()
            if "d" not in form:
                month = 12 if form == "%Y" else day.month
                day = day.replace(month=month, day=calendar.monthrange(day.year, month)[1])
            return day.isoformat()
    raise ValueError(f"{text!r} is no date such as 2015-10-07")


# ---------------------------------------------------------------- lists without judgements


def read_query_list(path: Path, *, numbered: bool = True) -> list[Sample]:
    """The queries of a file, in its order, as one line each.

    Files named as `records.SUFFIXES` have records with a field `question`, `query`, `text` or
    `pico`, and perhaps `id` or `_id`, `pub_date` and `collection`. All others have a query a line,
    as it is or as such a record in JSON. A query without an id has the id "", or, if they are
    `numbered`, the number of its line; then ids must differ within a collection.
    """
    queries: list[Sample] = []
    seen = set[tuple[str, str]]()
    for where, row in _rows(path):
        with records.refused(where):
            query = _query(row, *_ASKED)
        if numbered:
            query = dataclasses.replace(query, id=query.id or where.rpartition(":")[2])
            if (query.collection, query.id) in seen:
                raise InputError(f"{where}: another query is {query.id!r}; give each its own id.")
            seen.add((query.collection, query.id))
        queries.append(query)
    if not queries:
        raise InputError(f"{path} holds no query; write one a line.")
    return queries


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file of records; of another file its lines, as records."""
    if path.name.endswith(SUFFIXES):
        yield from read_records(path)
        return
    if path.name.endswith((".tsv", ".tsv.gz")):
        raise InputError(f"{path} is a table; write it as .csv with a column {_ASKED[0]!r}.")
    for number, line in read_lines(path):
        row: dict[str, Any] = {"text": line}
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = {}  # which is refused
        yield f"{path.name}:{number}", row


# ---------------------------------------------------------------- judged queries

NO_DOCUMENT, NO_TEXT = "queries without a relevant document", "judged queries without a text"


def read_judged_queries(part: DatasetPart) -> tuple[list[Sample], ReadReport]:
    """The queries of a part, and the report of what was skipped.

    Skipped are queries without a relevant document, judgements of queries that have no text, and
    all but the first of one id. A slice is of all queries of the part, skipped or not.

    Args:
        part: a folder in BEIR's layout, a file of rows (`judged_row`), or a folder with
            such a file for each split; of a file, the split may only give a slice.
    """
    path = Path(part.path).expanduser()
    if path.is_dir() and is_collection(path):
        files, placed = _collection(path, part.split)
    else:
        files = split_files(path, part.split, (f"{part.split}.jsonl",))
        rows = (row for file in files for row in read_records(file))
        placed = [(where, judged_row(where, row)) for where, row in rows]
    if part.bounds:
        placed = [placed[place] for place in part.of(len(placed))]
    names = tuple(map(str, files))
    return usable(part.path, (names, placed), _judged, "give the judgements of these queries.")


def _judged(query: Sample) -> Sample:
    if not query.grades:
        raise BadRecord(NO_DOCUMENT)
    if not query.question:
        raise BadRecord(NO_TEXT)
    return query


def _collection(folder: Path, split: str) -> tuple[list[Path], list[tuple[str, Sample]]]:
    """The files of a split, and its queries with their places.

    They are those of the split's own file, and those that are judged.
    """
    asked, judgements = queries_path(folder, split), qrels_path(folder, split)
    texts, qrels = read_queries(folder, split), read_qrels(judgements)
    ids = texts if asked.name.startswith(f"queries_{split}.") else ()
    placed = []
    for name in dict.fromkeys([*ids, *qrels]):
        grades = tuple((doc, grade) for doc, grade in qrels.get(name, {}).items() if grade >= 1)
        query = Sample(name, texts.get(name, "").strip(), grades=grades)
        placed.append((f"{asked.name}: {name}", query))
    return [asked, judgements], placed
