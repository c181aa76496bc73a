"""The data of the suite: halves of evaluation questions, and the two settings of the side-by-side.

A checkpoint's score is too optimistic on the questions that chose it, so one half of a data set's
dev questions chooses and the other one is reported. Training questions that are in dev are left
out.

A setting is one corpus and the same questions for every row. `2wiki` is 2WikiMultihopQA's open
corpus; `train` trains, `dev` is for all choices, `open_dev` is the test. `hotpotqa-pooled` are the
passages of all questions; `train` and `train_titles` less 200 train, those 200 are for all choices,
`dev` and `dev_titles` are the test. It is written as files in the forms that the systems read:

    corpus.jsonl, queries.jsonl, qrels/{train,dev,test}.tsv    BEIR's layout
    test.jsonl                    the test questions, for `qrag search`
    choosing/{train,dev}.jsonl    the data set's own layout; dev are the questions for choices
    testing/{train,dev}.jsonl     the same, but dev are the test questions
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.quality.logs import COUNTS, MOST, Lists, Scores
from benchmarks.quality.parts import HOTPOTQA, TWO_WIKI
from benchmarks.quality.runner import command, once, read_lines, write_lines
from examples.worlds.records import Question, two_wiki
from examples.worlds.scripts import BridgeQuestion, bridge_question
from qrag_jax.data.records import read_records, split_files
from qrag_jax.data.sample import Split, letters
from qrag_jax.data.sources import SOURCES, parse_open
from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import has_answer, worded
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.runtime.whole_files import half, write_whole

FOLDERS = {TWO_WIKI: "2wikimultihopqa", HOTPOTQA: "hotpotqa", "two_wiki": "2wikimultihopqa"}
TRAIN, CHOICE, TEST = PARTS = ("train", "dev", "test")
HELD_OUT = 200  # training questions of HotpotQA that are for choices
_FINISHED = "questions.json"  # written last
AP = f"ap@{MOST}"

Record = dict[str, Any]


def folder_of(data: Path, name: str) -> Path:
    """The folder of a data set or of a setting's data.

    Raises:
        InputError: it is not there.
    """
    folder = data / FOLDERS.get(name, name)
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; name the folder of the data sets in QRAG_DATA.")
    return folder


# ---------------------------------------------------------------- halves


def write_halves(source: str, folder: Path, out: Path) -> dict[str, Path]:
    """Writes a data folder's records as `train`, `half0` and `half1`; returns the files.

    Raises:
        InputError: `folder` has no files of a split, or one cannot be read.
    """
    files = {name: out / f"{source}-{name}.jsonl" for name in ("train", "half0", "half1")}
    if all(path.exists() for path in files.values()):
        return files
    dev = list(_split(source, folder, "dev"))
    asked = {record["question"] for record in dev}
    train = [r for r in _split(source, folder, "train") if r.get("question") not in asked]
    halves = [[r for r in dev if half(str(r.get("_id") or r["id"])) == n] for n in (0, 1)]
    for path, records in zip(files.values(), (train, *halves), strict=True):
        write_lines(path, records)
    return files


def own_halves(source: str, folder: Path, out: Path) -> dict[str, Path]:
    """The same files in the neutral schema: `own_train`, `own_half0` and `own_half1`."""
    neutral = {}
    for name, path in write_halves(source, folder, out).items():
        neutral[f"own_{name}"] = out / "own" / path.name
        words = (f"--source={source}", f"--path={path}", f"--out={neutral[f'own_{name}']}")
        once(out / f"own-{name}.done", command, "qrag_jax.data", *words)
    return neutral


def _split(source: str, folder: Path, split: Split) -> Iterable[Record]:
    for path in split_files(folder, split, (getattr(SOURCES[source], split),)):
        yield from _records(path)


# ---------------------------------------------------------------- settings


class Passage(NamedTuple):
    """A passage of the corpus."""

    name: str
    title: str
    text: str

    @property
    def whole(self) -> str:
        """Title and text."""
        return f"{self.title} {self.text}".strip()


class Asked(NamedTuple):
    """One question.

    gold: names of its gold passages in the corpus, each once, in the data's order.
    context: names of the passages that come with training questions and those for choices.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    context: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """A corpus and its questions, in a folder.

    Attributes:
        corpus: its passages.
        questions: part → its questions.
        left_out: number of questions of which the corpus lacks a gold passage, or whose text a
            later part has.
    """

    folder: Path
    corpus: Sequence[Passage]
    questions: Mapping[str, Sequence[Asked]]
    left_out: int

    @property
    def test(self) -> Sequence[Asked]:
        """The test questions."""
        return self.questions[TEST]

    def scores(self, lists: Lists, failed: Iterable[str] = ()) -> Scores:
        """The scores of each test question's list, cut at 2, 4, 6 and 10 passages.

        `all@k` is 1 if all gold passages are among the first k, `recall@k` the share of them,
        `ap@10` the average precision of the first 10, `answer@k` 1 if the answer stands in the
        first k, as whole words; a question whose answer is yes or no has none. A question without
        a list has an empty one; one that failed has no scores.
        """
        texts = {passage.name: passage.whole for passage in self.corpus}
        unknown, scores = {*failed}, dict[str, dict[str, float]]()
        qrels = {asked.id: dict.fromkeys(asked.gold, 1) for asked in self.test}
        precision = ranking_columns(lists, qrels, [AP])[AP]
        for asked in self.test:
            if asked.id in unknown:
                continue
            names, looked_for = lists.get(asked.id, ()), worded(asked.answers)
            row = scores[asked.id] = {AP: precision[asked.id]}
            for k in COUNTS:
                share = len({*asked.gold} & {*names[:k]}) / len(asked.gold)
                row |= {f"all@{k}": float(share == 1.0), f"recall@{k}": share}
                if looked_for:
                    stands = any(has_answer(texts[name], looked_for) for name in names[:k])
                    row[f"answer@{k}"] = float(stands)
        return scores


def setting(name: str, data: Path, folder: Path) -> Setting:
    """A setting of the data; its files are written if they are not there.

    Raises:
        InputError: the data are not there or cannot be read, or two questions have one id.
    """
    if not (folder / _FINISHED).exists():
        source = folder_of(data, name)
        _write(folder, *(_two_wiki(source) if name == TWO_WIKI else _hotpotqa(source)))
    kept = json.loads((folder / _FINISHED).read_text(encoding="utf-8"))
    questions = {
        part: [
            Asked(a["id"], a["text"], *(tuple(a[x]) for x in ("answers", "gold", "context")))
            for a in asked
        ]
        for part, asked in kept["questions"].items()
    }
    records = read_lines(folder / "corpus.jsonl")
    corpus = [Passage(record["_id"], record["title"], record["text"]) for record in records]
    return Setting(folder, corpus, questions, kept["left_out"])


def _write(
    folder: Path, source: str, corpus: Sequence[Passage], records: Mapping[str, Sequence[Record]]
) -> None:
    names: dict[str, str] = {}
    for passage in corpus:  # one that is written in two ways is one passage
        names.setdefault(letters(passage.whole), passage.name)
    parts: dict[str, list[tuple[Record, Asked]]] = {}
    ids, texts, left_out = set[str](), set[str](), 0
    for part in reversed(PARTS):
        parsed = [
            (record, _asked(SOURCES[source].parse(record), names)) for record in records[part]
        ]
        parts[part] = [(r, a) for r, a in parsed if a is not None and a.text not in texts]
        left_out += len(parsed) - len(parts[part])
        for _, asked in parts[part]:
            if asked.id in ids:
                raise InputError(f"two questions have the id {asked.id!r}; give other data.")
            ids.add(asked.id)
        texts |= {asked.text for _, asked in parts[part]}
    write_lines(
        folder / "corpus.jsonl", ({"_id": p.name, "title": p.title, "text": p.text} for p in corpus)
    )
    every = [asked for part in PARTS for _, asked in parts[part]]
    write_lines(folder / "queries.jsonl", ({"_id": a.id, "text": a.text} for a in every))
    for part in PARTS:
        lines = [f"{a.id}\t{name}\t1" for _, a in parts[part] for name in a.gold]
        text = "\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n"
        write_whole(folder / "qrels" / f"{part}.tsv", text)
    test = ({"id": a.id, "question": a.text} for _, a in parts[TEST])
    write_lines(folder / "test.jsonl", test)
    for out, dev in (("choosing", CHOICE), ("testing", TEST)):
        for file, part in (("train", TRAIN), ("dev", dev)):
            write_lines(folder / out / f"{file}.jsonl", (record for record, _ in parts[part]))
    kept = {part: [asked._asdict() for _, asked in parts[part]] for part in PARTS}
    write_whole(folder / _FINISHED, json.dumps({"questions": kept, "left_out": left_out}))


def _asked(sample: Any, names: Mapping[str, str]) -> Asked | None:
    """None: the corpus lacks a gold passage."""
    context = [names.get(letters(chunk)) for chunk in sample.chunks]
    gold = dict.fromkeys(context[place] for place in sample.support)
    if not gold or None in gold:
        return None
    known = tuple(dict.fromkeys(name for name in context if name is not None))
    needed = tuple(name for name in gold if name is not None)
    return Asked(sample.id, sample.question, sample.answers, needed, known)


def _two_wiki(source: Path) -> tuple[str, list[Passage], dict[str, list[Record]]]:
    corpus = [
        Passage(record["_id"], record["title"], record["text"])
        for record in _records(source / "open_corpus.jsonl.gz")
    ]
    by_name = {passage.name: passage for passage in corpus}
    test = [_with_gold(record, by_name) for record in _records(source / "open_dev.jsonl.gz")]
    parts = {part: _records(source / f"{part}.jsonl.gz") for part in (TRAIN, CHOICE)}
    return "two_wiki", corpus, parts | {TEST: test}


def _with_gold(record: Record, corpus: Mapping[str, Passage]) -> Record:
    """A test record, which has no context, with its gold passages as one.

    No system is shown it: it says where the gold passages are in the corpus. One that the corpus
    lacks is there by its title alone, so that it is missed.
    """
    pages = parse_open(record).gold
    gold = [corpus.get(page.name, Passage("", page.title, "")) for page in pages]
    context = {passage.title: [passage.title, [passage.text]] for passage in gold}
    facts = [[title, 0] for title in context]
    return record | {"supporting_facts": facts, "context": [*context.values()]}


def _hotpotqa(source: Path) -> tuple[str, list[Passage], dict[str, list[Record]]]:
    train, test = (
        [r for file in (part, f"{part}_titles") for r in _records(source / f"{file}.jsonl.gz")]
        for part in ("train", "dev")
    )
    order = np.random.default_rng(0).permutation(len(train))
    held = {*order[: min(HELD_OUT, len(train) // 2)].tolist()}
    pooled: dict[str, Passage] = {}
    for record in (*train, *test):
        for title, sentences in record["context"]:
            passage = Passage("", title, "".join(sentences).strip())
            pooled.setdefault(letters(passage.whole), passage)
    corpus = [p._replace(name=f"hotpotqa-{n}") for n, p in enumerate(pooled.values())]
    parts = {
        TRAIN: [record for place, record in enumerate(train) if place not in held],
        CHOICE: [train[place] for place in sorted(held)],
        TEST: test,
    }
    return "hotpotqa", corpus, parts


def _records(path: Path) -> list[Record]:
    return [record for _, record in read_records(path)]


# ---------------------------------------------------------------- invented


def write_invented(data: Path, *counts: int, passages: int = 6) -> None:
    """Writes 2WikiMultihopQA's files of an invented world, for --quick and tests.

    Args:
        data: the folder of all data.
        counts: questions of train, dev and test; no text is in two of them.
    """
    folder = data / FOLDERS[TWO_WIKI]
    train, dev, test = (
        [bridge_question(seed, "train", number, passages) for number in range(count)]
        for seed, count in enumerate(counts)
    )
    names: dict[tuple[str, str], str] = {}
    for question in (*train, *dev, *test):
        for passage in question.passages:
            names.setdefault((passage.title, passage.text), f"{len(names)}")
    corpus = ({"_id": n, "title": title, "text": text} for (title, text), n in names.items())
    files: dict[str, Iterable[Record]] = {"open_corpus": corpus}
    files |= {"train": map(_record, train), "dev": map(_record, dev)}
    files["open_dev"] = (_open(question, names) for question in test)
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def _record(question: BridgeQuestion) -> Record:
    paragraphs = [(passage.title, [passage.text]) for passage in question.passages]
    return two_wiki(
        Question(
            question.id, question.question, question.answer, paragraphs, sorted(question.chain)
        )
    )


def _open(question: BridgeQuestion, names: Mapping[tuple[str, str], str]) -> Record:
    """As `open_dev` has it: gold passages by their ids, and no context."""
    record = _record(question)
    del record["context"]
    by_title = {gold.title: names[gold.title, gold.text] for gold in question.supporting}
    titles = [title for title, _ in record["supporting_facts"]]
    return record | {"gold_doc_ids": [by_title[title] for title in titles]}
