"""Readers of data sets: records, questions, collections, stories, lists of queries, preferences."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tried_inputs import FileReader
from qrag_jax.data.files import babi, beir, corpora, query_lists, records
from qrag_jax.data.files.asked_questions import read_questions
from qrag_jax.data.files.text_files import read_text
from qrag_jax.data.query_questions import read_query_questions
from qrag_jax.data.sources.registry import SOURCES, load_samples
from qrag_jax.metrics import trec
from qrag_jax.retrieval.judged_queries import read_judged_queries

_PARAGRAPHS = [
    ("Oslo", ["Oslo is the capital of Norway.", "It lies on a fjord."]),
    ("Norway", ["Norway is in Europe.", "Its king is Harald."]),
    ("Ada Berg", ["Ada Berg was born in Oslo."]),
]
_HOVER = {
    "uid": "h1",
    "claim": "Ada Berg was born in the capital of Norway.",
    "label": "SUPPORTED",
    "num_hops": 2,
    "supporting_facts": [["Ada Berg", 0], ["Oslo", 0]],
}
_PICO = {
    "id": 7,
    "pico": {"P": "adults", "I": "aspirin", "C": "placebo", "O": "pain"},
    "publication_pmids": ["11", 12],
    "pub_date": "2015-03",
    "answers": ["yes"],
}
_QUERY = {"id": "q1", "query": "aspirin for pain", "relevant_doc_ids": ["11"], "pub_date": "2015"}
_STORY = (
    "1 Mary moved to the hall.\n2 John went to the garden.\n3 Where is Mary?\thall\t1\n"
    "1 Ann took the milk.\n2 Where is the milk?\thall\t1\n"
)
_TABLE = (
    b"question,chunks,support,answers\n"
    b'"Where, then?","[""Oslo is in Norway."", ""A fjord.""]",[0],Norway\n'
    b'Who?,"[""Ada Berg.""]","[0]","[""Ada"", ""A. Berg""]"\n'
)


def _lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _written(files: dict[str, bytes], folder: Path) -> Sequence[Path]:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return [folder / name for name in files]


def _reader(name: str, files: dict[str, bytes], read: Callable[[Path], Any]) -> FileReader:
    return FileReader(name, functools.partial(_written, files), read)


def _source_records(source: str) -> list[dict[str, Any]]:
    make = SOURCES[source].to_record
    return [
        make(f"{source}{number}", "Where was Ada Berg born?", "Oslo", _PARAGRAPHS, [0, 2])
        for number in range(3)
    ]


def _parquet(folder: Path) -> Sequence[Path]:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": ["a", "b"], "title": ["A", "B"], "text": ["one", "two"]})
    pyarrow.parquet.write_table(table, folder / "corpus.parquet")
    return [folder / "corpus.parquet"]


def _own_parquet(folder: Path) -> Sequence[Path]:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "question": ["Where?", "Who?"],
        "chunks": [["Oslo is in Norway.", "It lies on a fjord."], ["Ada Berg."]],
        "support": [[0], [0]],
        "answers": [["Norway"], ["Ada", "A. Berg"]],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")
    return [folder / "train.parquet"]


def _read_corpus(folder: Path, name: str) -> list[Any]:
    return list(corpora.read_corpus(folder / name))


def _read_collection(folder: Path) -> Any:
    list(beir.read_documents(folder))
    beir.read_queries(folder)
    return read_judged_queries(f"{folder},test")


def readers() -> list[FileReader]:
    """The readers of this module."""
    documents = [
        {"_id": "d1", "title": "Oslo", "text": "It lies on a fjord.", "metadata": {"year": 2020}},
        {"_id": "d2", "title": "", "text": "Norway is in Europe.", "metadata": {}},
    ]
    queries = [{"_id": "q1", "text": "Where is Oslo?"}, {"_id": "q2", "text": "Who?"}]
    qrels = f"{trec.BEIR_HEADER}\nq1\td1\t1\nq2\td2\t2\n".encode()
    contents = [{"id": 1, "contents": '"Oslo"\nIt lies.'}, {"id": 2, "contents": "No title."}]
    rows = [_QUERY, {**_QUERY, "id": "q2"}]
    run = b"q1 Q0 d1 1 2.5 tag\nq1 Q0 d2 2 1.5 tag\nq2 Q0 d1 1 0.5 tag\n"
    found = [
        *(
            _reader(
                f"records, {name}",
                {name: data},
                lambda folder, name=name: list(records.read_records(folder / name)),  # type: ignore[misc]
            )
            for name, data in (
                ("rows.jsonl", _lines(rows)),
                ("rows.json", json.dumps({"data": rows}).encode()),
                ("list.json", json.dumps(rows).encode()),
                ("rows.jsonl.gz", _lines(rows)),
                ("rows.json.gz", json.dumps(rows).encode()),
                ("rows.csv", _TABLE),
                ("rows.csv.gz", _TABLE),
            )
        ),
        *(
            _reader(
                f"data set {source}",
                {"train.jsonl": _lines(_source_records(source))},
                lambda folder, source=source: load_samples(  # type: ignore[misc]
                    source, str(folder), "train"
                ),
            )
            for source in SOURCES
        ),
        _reader(
            "data of one's own, CSV",
            {"train.csv": _TABLE},
            lambda folder: load_samples("own", str(folder / "train.csv"), "train"),
        ),
        FileReader(
            "data of one's own, Parquet",
            _own_parquet,
            lambda folder: load_samples("own", str(folder / "train.parquet"), "train"),
        ),
        _reader(
            "data set hover, as questions",
            {"dev.jsonl": _lines([_HOVER, {**_HOVER, "uid": "h2"}])},
            lambda folder: read_query_questions(f"{folder / 'dev.jsonl'},hover,dev"),
        ),
        _reader(
            "questions without a context",
            {
                "dev.jsonl": _lines(
                    [
                        {
                            "id": "1",
                            "question": "Who?",
                            "answer": "Ada",
                            "supporting_facts": [["Ada Berg", 0]],
                        }
                    ]
                )
            },
            lambda folder: read_query_questions(f"{folder / 'dev.jsonl'},default,dev"),
        ),
        _reader(
            "bAbI stories",
            {"qa1_train.txt": _STORY.encode()},
            lambda folder: babi.read_stories(folder / "qa1_train.txt"),
        ),
        _reader(
            "texts, gzip'd",
            {"book.txt.gz": _STORY.encode()},
            lambda folder: read_text(folder / "book.txt.gz"),
        ),
        _reader(
            "a collection in BEIR's layout",
            {
                "corpus.jsonl": _lines(documents),
                "queries.jsonl": _lines(queries),
                "qrels/test.tsv": qrels,
            },
            _read_collection,
        ),
        _reader(
            "a corpus with contents",
            {"wiki.jsonl": _lines(contents)},
            functools.partial(_read_corpus, name="wiki.jsonl"),
        ),
        FileReader(
            "a corpus, Parquet", _parquet, functools.partial(_read_corpus, name="corpus.parquet")
        ),
        _reader(
            "judged rows",
            {"dev.jsonl": _lines([_PICO, _QUERY])},
            lambda folder: read_judged_queries(f"{folder / 'dev.jsonl'},dev"),
        ),
        _reader(
            "a list of queries, rows",
            {"queries.jsonl": _lines([{"_id": "1", "text": "one"}, _QUERY])},
            lambda folder: query_lists.read_query_list(folder / "queries.jsonl"),
        ),
        _reader(
            "a list of queries, text",
            {"queries.txt": b"where is oslo\nwho is king\n"},
            lambda folder: query_lists.read_query_list(folder / "queries.txt"),
        ),
        _reader(
            "questions of qrag search",
            {"asked.txt": b'{"id": 1, "question": "Where?"}\nWho is king?\n{"text": "What?"}\n'},
            lambda folder: list(read_questions(folder / "asked.txt")),
        ),
        _reader("qrels, BEIR", {"q.tsv": qrels}, lambda folder: trec.read_qrels(folder / "q.tsv")),
        _reader(
            "qrels, TREC, gzip'd",
            {"q.txt.gz": b"q1 0 d1 1\nq1 0 d2 0\n"},
            lambda folder: trec.read_qrels(folder / "q.txt.gz"),
        ),
        _reader("a TREC run", {"run.txt": run}, lambda folder: trec.read_run(folder / "run.txt")),
    ]
    return found
