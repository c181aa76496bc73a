"""Every format of data and every source: what is written is read, what is damaged is refused.

A new format is tested by a line in `FORMATS`, a new source by its line in the registry.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from qrag_jax.data import corpora, episodes, long_docs, records
from qrag_jax.data.corpora import BEIR_HEADER, judged_row, read_query_list
from qrag_jax.data.loading import SETTINGS, DataConfig, load_split
from qrag_jax.data.long_docs import BabilongConfig, NiahConfig
from qrag_jax.data.reading import load_samples
from qrag_jax.data.sample import Passage, Sample
from qrag_jax.data.sources import SOURCES
from qrag_jax.errors import InputError
from qrag_jax.runtime.retriever_config import passage_text
from tests.episodes_maker import random_store
from tests.support import worlds
from tests.support.worlds import record_of
from tests.test_mutated_inputs import mutants

QUICK = settings(max_examples=20, deadline=None, derandomize=True, database=None)
SHORT = settings(QUICK, max_examples=8)
# Any characters, and those at which other readers end a line.
TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t\u2028\u0085"), max_size=8
)
WORDS = st.text(st.characters(categories=["L", "N"], max_codepoint=0x2FFF), min_size=1, max_size=6)
LINES = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def listed(values: st.SearchStrategy[Any], **options: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=1, max_size=4, **options)


class Format(NamedTuple):
    """A format of files: what it can hold, and how it is written to a folder and read from it."""

    name: str
    values: st.SearchStrategy[Any]
    write: Callable[[Path, Any], Any]
    read: Callable[[Path], Any]


def as_lines(path: Path, rows: Iterable[Any], *, escaped: bool = False) -> None:
    data = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def as_document(path: Path, rows: Sequence[Any]) -> None:
    path.write_text(json.dumps({"version": 1, "data": rows}, indent=1))


def as_table(path: Path, rows: Sequence[dict[str, str | None]]) -> None:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows(rows)


def as_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def records_of(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in records.read_records(path)]


def documents_of(path: Path) -> list[Passage]:
    return [passage for _, passage in corpora.read_corpus(path)]


def rows_of(documents: Sequence[Passage]) -> list[dict[str, Any]]:
    return [{"id": d.name, "title": d.title, "text": d.text} | d.metadata for d in documents]


def as_collection(folder: Path, content: tuple[list[Passage], dict[str, str]]) -> None:
    """Further fields in `metadata` or next to it, which may be null, as an empty title may."""
    rows = []
    for number, d in enumerate(content[0]):
        more = {"metadata": d.metadata} if number % 2 else {"metadata": None, **d.metadata}
        rows.append({"_id": d.name, "title": d.title or None, "text": d.text} | more)
    as_lines(folder / "corpus.jsonl.gz", rows)
    as_lines(folder / "queries.jsonl", [{"_id": k, "text": v} for k, v in content[1].items()])


def as_parts(folder: Path, documents: Sequence[Passage]) -> None:
    for number, row in enumerate(rows_of(documents)):
        as_lines(folder / f"part-{number}.jsonl", [row])
    (folder / "README.md").write_text("no part of the corpus")


def as_contents(path: Path, documents: Sequence[Passage]) -> None:
    """As wiki18_100w has them: the title in quotes on a line of its own."""
    titles = [f'"{d.title}"' if d.title else "" for d in documents]
    rows = [{"id": d.name, "contents": f"{t}\n{d.text}"} for t, d in zip(titles, documents)]
    as_lines(path, [row | d.metadata for row, d in zip(rows, documents)])


def as_beir_qrels(path: Path, qrels: dict[str, dict[str, int]]) -> None:
    rows = [f"{q}\t{d}\t{grade}\n" for q, judged in qrels.items() for d, grade in judged.items()]
    path.write_bytes(gzip.compress("".join([f"{BEIR_HEADER}\n", *rows]).encode()))


def as_stories(path: Path, stories: Sequence[Sample]) -> None:
    for story in stories:
        lines = [f"{number} {fact}" for number, fact in enumerate(story.chunks, 1)]
        support = " ".join(str(place + 1) for place in story.support)
        lines.append(f"{len(lines) + 1} {story.question}\t{story.answers[0]}\t{support}")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


@st.composite
def a_story(draw: st.DrawFn) -> Sample:
    facts = tuple(f"{text}." for text in draw(listed(LINES)))
    support = draw(st.sets(st.sampled_from(range(len(facts))), min_size=1))
    return Sample("", f"{draw(LINES)}?", facts, (*sorted(support),), (draw(WORDS),), "babilong")


@st.composite
def a_question(draw: st.DrawFn) -> dict[str, Any]:
    """A question as `record_of` takes it, its supporting paragraphs in any order."""
    titles = draw(listed(LINES, unique=True))
    support = draw(st.lists(st.sampled_from(range(len(titles))), min_size=1, unique=True))
    paragraphs = [(title, [f"{text}." for text in draw(listed(LINES))]) for title in titles]
    question = {"question": f"{draw(LINES)}?", "answer": draw(LINES)}
    return question | {"paragraphs": paragraphs, "support": support}


def in_cells(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}


def in_columns(row: dict[str, Any]) -> dict[str, Any]:
    """HotpotQA's records as they are on the hub."""
    context, facts = (map(list, zip(*row.pop(k))) for k in ("context", "supporting_facts"))
    changed = {"context": dict(zip(("title", "sentences"), context)), "id": row.pop("_id")}
    return row | changed | {"supporting_facts": dict(zip(("title", "sent_id"), facts))}


def by_titles(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"supporting_titles": [title for title, _ in row.pop("supporting_facts")]}


def renumbered(row: dict[str, Any]) -> dict[str, Any]:
    """MuSiQue's steps name paragraphs by `idx`, whatever their places and marks are."""
    for each in row["paragraphs"]:
        each |= {"idx": each["idx"] + 10, "is_supporting": False}
    for each in row["question_decomposition"]:
        each["paragraph_support_idx"] += 10
    return row


# form → the source, the end of its files, and what is done to each record.
SOURCE_FORMS: dict[str, tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    **{source: (source, "jsonl", dict) for source in SOURCES},
    "own, a table": ("own", "csv.gz", in_cells),
    "hotpotqa, columns": ("hotpotqa", "jsonl", in_columns),
    "hotpotqa, titles": ("hotpotqa", "jsonl", by_titles),
    "musique, renumbered": ("musique", "jsonl", renumbered),
}


def as_source(form: str, folder: Path, questions: Sequence[dict[str, Any]]) -> None:
    source, end, changed = SOURCE_FORMS[form]
    official = SOURCES[source].train
    rows = [changed(record_of(source, id=f"r{n}", **item)) for n, item in enumerate(questions)]
    path = folder / f"{official.partition('.json')[0]}.{end}"
    (as_table if "csv" in end else as_lines)(path, rows)


def source_of(form: str, folder: Path) -> list[Any]:
    """Samples, which are sound however damaged the records are."""
    source = SOURCE_FORMS[form][0]
    samples, report = load_samples(source, str(folder), "train")
    assert report.read == report.kept + sum(report.skipped.values())
    for sample in samples:
        assert len(set(sample.support)) == len(sample.support)
        assert all(0 <= fact < len(sample.chunks) for fact in sample.support)
        assert (sample.source, bool(sample.chunks)) == (source, True)
    return [(s.question, s.answers, s.support, s.chunks) for s in samples]


JSON_ROWS = listed(st.dictionaries(TEXTS, VALUES, max_size=4))
NAMED = st.tuples(LINES, TEXTS, LINES | st.just(""), st.none() | TEXTS)
DOCUMENTS = listed(NAMED, unique_by=lambda item: item[0]).map(
    lambda rows: [Passage(name, text, title, {"k": more}) for name, text, title, more in rows]
)
CELLS = st.none() | TEXTS.filter(bool)
TABLES = st.lists(WORDS, min_size=2, max_size=3, unique=True).flatmap(
    lambda names: listed(st.fixed_dictionaries(dict.fromkeys(names, CELLS)))
)
COLUMNS = {"id": TEXTS, "n": st.none() | st.integers(0, 9), "more": listed(TEXTS)}
QUERY = {"id": WORDS, "query": LINES}
QUERIES = listed(st.fixed_dictionaries(QUERY), unique_by=lambda item: item["id"])
GRADES = {"relevant_doc_ids": st.lists(WORDS, unique=True, max_size=3)}
JUDGED = listed(st.fixed_dictionaries(QUERY | GRADES))


def judgements(documents: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, dict[str, int]]]:
    of_query = st.dictionaries(documents, st.integers(-2, 9), min_size=1, max_size=3)
    return st.dictionaries(WORDS, of_query, min_size=1, max_size=3)


def one(name: str, values: Any, write: Any, read: Any) -> Format:
    """A format of one file."""
    return Format(name, values, lambda at, rows: write(at / name, rows), lambda at: read(at / name))


def judged_of(path: Path) -> list[Any]:
    values = [judged_row(*item) for item in records.read_records(path)]
    grades = [[name for name, _ in item.grades] for item in values]
    return [dict(zip((*QUERY, *GRADES), (q.id, q.question, g))) for q, g in zip(values, grades)]


def queries_of(read: Callable[[Path], Iterable[Any]]) -> Callable[[Path], list[Any]]:
    return lambda path: [dict(zip(QUERY, (each.id, each.question))) for each in read(path)]


FORMATS = [
    one("r.jsonl", JSON_ROWS, as_lines, records_of),
    one("r.jsonl.gz", JSON_ROWS, partial(as_lines, escaped=True), records_of),
    one("r.json", JSON_ROWS, as_document, records_of),
    one("r.csv.gz", TABLES, as_table, records_of),
    one("r.parquet", listed(st.fixed_dictionaries(COLUMNS)), as_parquet, records_of),
    one("c.jsonl", DOCUMENTS, lambda at, rows: as_lines(at, rows_of(rows)), documents_of),
    one("c.parquet", DOCUMENTS, lambda at, rows: as_parquet(at, rows_of(rows)), documents_of),
    one("w.jsonl", DOCUMENTS, as_contents, documents_of),
    Format("a folder of parts", DOCUMENTS, as_parts, documents_of),
    Format(
        "a BEIR folder",
        st.tuples(DOCUMENTS, st.dictionaries(WORDS, LINES, min_size=1, max_size=3)),
        as_collection,
        lambda at: (documents_of(at), corpora.read_queries(at)),
    ),
    one("qa1_train.txt", listed(a_story()), as_stories, long_docs.read_stories),
    one(
        "asked.txt",
        listed(LINES),
        lambda at, rows: at.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8"),
        lambda at: [item.question for item in read_query_list(at)],
    ),
    one("asked.jsonl", QUERIES, as_lines, queries_of(read_query_list)),
    one("questions.csv", QUERIES, as_table, queries_of(read_query_list)),
    one("judged.jsonl", JUDGED, as_lines, judged_of),
    one("run.qrels", judgements(WORDS), corpora.write_qrels, corpora.read_qrels),
    one("qrels.tsv.gz", judgements(LINES), as_beir_qrels, corpora.read_qrels),
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@QUICK
@given(data=st.data())
def test_what_is_written_is_read(format: Format, data: st.DataObject) -> None:
    value = data.draw(format.values)
    with tempfile.TemporaryDirectory() as folder:
        format.write(Path(folder), value)
        assert format.read(Path(folder)) == value


@pytest.mark.parametrize("form", SOURCE_FORMS)
@QUICK
@given(questions=listed(a_question()))
def test_every_source_reads_what_it_writes(form: str, questions: list[Any]) -> None:
    """Its official file in a folder; the facts in the order of the data, all within the chunks."""
    with tempfile.TemporaryDirectory() as folder:
        as_source(form, Path(folder), questions)
        values = source_of(form, Path(folder))
    for sample, item in zip(values, questions, strict=True):
        assert sample[:3] == (item["question"], (item["answer"],), tuple(item["support"]))
        mark = DataConfig(sources={SOURCE_FORMS[form][0]: 1.0}).passage_separator
        texts = [passage_text(title, " ".join(said), mark) for title, said in item["paragraphs"]]
        assert [*sample[3]] == texts  # as titles of a corpus are joined


OF_SOURCES = [
    Format(form, listed(a_question()), partial(as_source, form), partial(source_of, form))
    for form in SOURCE_FORMS
]


@pytest.mark.parametrize("format", [*FORMATS, *OF_SOURCES], ids=lambda format: format.name)
@settings(QUICK, max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_damaged_file_is_read_or_refused_in_a_line_that_names_it(
    format: Format, data: st.DataObject, seed: int
) -> None:
    value, draw = data.draw(format.values), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        format.write(Path(folder), value)
        path = draw.choice(sorted(Path(folder).iterdir()))
        damaged = draw.choice([*mutants(path.read_bytes(), draw, path.name, 3)])
        path.write_bytes(damaged)
        try:
            format.read(Path(folder))
        except InputError as error:
            said = str(error)
            assert path.name in said, damaged[:200]
            assert not any(mark in said for mark in "\n\r\x00"), damaged[:200]


@pytest.mark.parametrize("source", [*SOURCES, "babilong"])
def test_every_source_has_questions_without_files(source: str, tmp_path: Path) -> None:
    config = DataConfig(
        path="" if source in SETTINGS else worlds.path_of(f"six_{source}"),
        sources={source: 1.0},
        babilong=BabilongConfig(chunks=15, train=6, dev=4),
        niah=NiahConfig(chunks=15, train=6, dev=4),
        cache=str(tmp_path),
    )
    splits = [[*load_split(config, split, hold_out=True).all] for split in ("train", "dev")]
    assert [len(samples) for samples in splits] == [6, 4]
    every = [sample for samples in splits for sample in samples]
    assert len({sample.id for sample in every}) == 10
    for sample in every:
        assert sample.source == source
        assert sample.question
        assert sample.answers
        assert 0 < len(set(sample.support)) == len(sample.support)
        gold = " ".join(sample.chunks[fact] for fact in sample.support)  # all within the chunks
        assert all(answer in gold for answer in sample.answers)
    assert [*load_split(config, "train", hold_out=True).all] == splits[0]


STORES = {"one": random_store(0, 24), "two": random_store(1, 10, 5000)}
SHAPE = episodes.EpisodeShape.holding([*STORES.values()])
SHARES = {"one": 0.7, "two": 0.3}


def batches(seed: int, size: int, **options: Any) -> Any:
    flags.FLAGS.mark_as_parsed()  # Grain reads flags
    return episodes.training_batches(STORES, SHARES, SHAPE, batch_size=size, seed=seed, **options)


def bits(batch: episodes.EpisodeBatch) -> bytes:
    return b"".join(np.asarray(field).tobytes() for field in batch)


def joined(parts: Iterable[episodes.EpisodeBatch]) -> episodes.EpisodeBatch:
    return episodes.EpisodeBatch(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))


@SHORT
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1, 3, 4]), stop=st.integers(0, 9))
def test_batches_are_of_the_seed_and_the_position_alone(seed: int, size: int, stop: int) -> None:
    """Resumed = uninterrupted, bit for bit; another seed has another order."""
    whole = batches(seed, size)
    every = [bits(next(whole)) for _ in range(15)]
    half = batches(seed, size)
    assert [bits(next(half)) for _ in range(stop)] == every[:stop]
    resumed = batches(seed, size)
    resumed.set_state(json.loads(json.dumps(half.get_state())))
    assert [bits(next(resumed)) for _ in range(15 - stop)] == every[stop:]
    other = batches(seed + 1, size)
    assert [bits(next(other)) for _ in range(15)] != every


@SHORT
@given(seed=st.integers(0, 2**31), hosts=st.sampled_from([2, 4]), evaluated=st.integers(0, 24))
def test_the_parts_of_hosts_are_the_whole(seed: int, hosts: int, evaluated: int) -> None:
    one = batches(seed, 4)
    parts = [batches(seed, 4 // hosts, shard=(host, hosts)) for host in range(hosts)]
    for _ in range(9):
        assert bits(next(one)) == bits(joined(next(part) for part in parts))
    indices = random.Random(seed).sample(range(24), evaluated)
    whole = [*episodes.evaluation_batches(STORES["one"], SHAPE, 4, indices)]
    shards: list[Iterator[episodes.EpisodeBatch]] = [
        episodes.evaluation_batches(STORES["one"], SHAPE, 4, indices, (host, hosts))
        for host in range(hosts)
    ]
    for batch in whole:
        assert bits(batch) == bits(joined(next(shard) for shard in shards))
    values = [int(number) for batch in whole for number in batch.sample]
    assert values == indices + [episodes.PADDING_SAMPLE] * (-evaluated % 4)


@SHORT
@given(seed=st.integers(0, 2**31), size=st.sampled_from([4, 5]))
def test_no_question_is_lost_or_repeated_within_an_epoch(seed: int, size: int) -> None:
    """Also where a batch runs over the end of one, and item source through its own epochs."""
    iterator = batches(seed, size)
    values = joined(next(iterator) for _ in range(200 // size))
    for first, count in ((0, 24), (24, 10)):
        own = (values.sample >= first) & (values.sample < first + count)
        numbers, epochs = values.sample[own], values.epoch[own]
        assert epochs.tolist() == [place // count for place in range(len(epochs))]
        for epoch in range(len(numbers) // count):
            part = sorted(numbers[epochs == epoch].tolist())
            assert part == list(range(first, first + count))
    assert abs(np.sum(values.sample < 24) - 140) <= 1
