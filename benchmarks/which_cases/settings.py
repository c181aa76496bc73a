"""The settings of the suite which: one corpus each, the same questions for every row.

`2wiki`: 2WikiMultihopQA's open corpus; `train` trains, `dev` is for all choices, `open_dev` is the
test. `hotpotqa`: the pooled passages of all its questions; `train` and `train_titles` less 200
train, those 200 are for all choices, `dev` and `dev_titles` are the test. A passage that is written
in two ways (other blanks or punctuation) is one passage. A training question that is in the test,
too, is left out of training (HotpotQA's files have two).

A setting is written as files, in the forms that the systems read:

    corpus.jsonl, queries.jsonl, qrels/{train,dev,test}.tsv    BEIR's layout
    choosing/{train,dev}.jsonl    the data set's own layout; dev are the questions for choices
    testing/{train,dev}.jsonl     the same, but dev are the test questions

A test question of 2WikiMultihopQA comes without a context; its file gives it its gold passages as
one, which tells where they are in the corpus and is shown to no system.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sources import hotpotqa, titled_context, two_wiki
from qrag_jax.errors import InputError
from qrag_jax.metrics.trec import read_qrels
from qrag_jax.retrieval.gold_names import letters
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.runtime.whole_files import write_whole

TWO_WIKI, HOTPOTQA = SETTINGS = ("2wiki", "hotpotqa")
FOLDERS = {TWO_WIKI: "2wikimultihopqa", HOTPOTQA: "hotpotqa"}  # of the data
TRAIN, CHOICE, TEST = PARTS = ("train", "dev", "test")
HELD_OUT = 200  # training questions of HotpotQA that are for choices
CHOOSING, TESTING = "choosing", "testing"
_FINISHED = "questions.json"  # written last

Record = dict[str, Any]


class Asked(NamedTuple):
    """One question.

    gold: names of its gold passages in the corpus, each once.
    own: names of its own passages, which are there for training questions and those for choices.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    own: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """A corpus and its questions, in a folder.

    Attributes:
        name: a name in `SETTINGS`.
        corpus: its passages.
        questions: part → its questions.
        lacking: part → number of questions of which the corpus lacks a gold passage; they are left
            out.
        repeated: number of questions that are left out because a later part has their text.
    """

    name: str
    folder: Path
    corpus: Sequence[Passage]
    questions: Mapping[str, Sequence[Asked]]
    lacking: Mapping[str, int]
    repeated: int = 0

    @property
    def choosing(self) -> Path:
        """Folder of the questions to train on and to choose by."""
        return self.folder / CHOOSING

    @property
    def testing(self) -> Path:
        """Folder of the questions to train on and to test by."""
        return self.folder / TESTING

    @property
    def test(self) -> Sequence[Asked]:
        """The test questions."""
        return self.questions[TEST]

    @property
    def told(self) -> str:
        """What it is, in a sentence."""
        sizes = {part: len(self.questions[part]) for part in PARTS}
        lacking = sum(self.lacking.values())
        return (
            f"{self.name}: {len(self.corpus):,} passages; {sizes[TRAIN]} training questions, "
            f"{sizes[CHOICE]} for choices, {sizes[TEST]} of the test; the corpus lacks a gold "
            f"passage of {lacking} questions"
            + (", which are left out" if lacking else "")
            + (
                f"; {self.repeated} are left out of training, which are in the test"
                * bool(self.repeated)
            )
            + "."
        )


def setting(name: str, data: Path, folder: Path) -> Setting:
    """A setting of the data; its files are written if they are not there.

    Args:
        data: folder of the data sets, such as QRAG_DATA.
        folder: of the setting.

    Raises:
        InputError: the data are not there or cannot be read, or two questions have one id.
    """
    if not (folder / _FINISHED).exists():
        source = data / FOLDERS[name]
        if not source.is_dir():
            raise InputError(
                f"{source} is no folder; name the folder of the data sets in QRAG_DATA."
            )
        write(folder, *(_two_wiki(source) if name == TWO_WIKI else _hotpotqa(source)))
    return read(name, folder)


class Given(NamedTuple):
    """Records of one part in the data set's layout, with their contexts."""

    part: str
    records: Sequence[Record]


def write(
    folder: Path, source: ModuleType, corpus: Sequence[Passage], given: Sequence[Given]
) -> None:
    """Writes the files of a setting.

    Args:
        source: module of the data set, which reads a record.

    Raises:
        InputError: two questions have one id.
    """
    names: dict[str, str] = {}
    for passage in corpus:
        names.setdefault(letters(passage.whole), passage.name)
    parts: dict[str, list[tuple[Record, Asked]]] = {part: [] for part in PARTS}
    lacking = dict.fromkeys(PARTS, 0)
    for part, records in given:
        for record in records:
            asked = _asked(source.parse(record), names)
            if asked is None:
                lacking[part] += 1
            else:
                parts[part].append((record, asked))
    repeated = _part_from_later(parts)
    _write_lines(
        folder / "corpus.jsonl",
        ({"_id": each.name, "title": each.title, "text": each.text} for each in corpus),
    )
    every = [asked for own in parts.values() for _, asked in own]
    _write_lines(folder / "queries.jsonl", ({"_id": a.id, "text": a.text} for a in every))
    for part, own in parts.items():
        lines = [f"{a.id}\t{name}\t1" for _, a in own for name in a.gold]
        text = "\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n"
        write_whole(_ready(folder / "qrels" / f"{part}.tsv"), text)
    for out, dev in ((CHOOSING, CHOICE), (TESTING, TEST)):
        for file, part in (("train", TRAIN), ("dev", dev)):
            _write_lines(folder / out / f"{file}.jsonl", (record for record, _ in parts[part]))
    questions = {part: [asked._asdict() for _, asked in own] for part, own in parts.items()}
    kept = {"questions": questions, "lacking": lacking, "repeated": repeated}
    write_whole(folder / _FINISHED, json.dumps(kept, ensure_ascii=False) + "\n")


def read(name: str, folder: Path) -> Setting:
    """The setting that `write` wrote."""
    kept = json.loads((folder / _FINISHED).read_text(encoding="utf-8"))
    questions = {
        part: [
            Asked(a["id"], a["text"], tuple(a["answers"]), tuple(a["gold"]), tuple(a["own"]))
            for a in own
        ]
        for part, own in kept["questions"].items()
    }
    corpus = [
        Passage(record["_id"], record["text"], record["title"])
        for _, record in read_records(folder / "corpus.jsonl")
    ]
    return Setting(name, folder, corpus, questions, kept["lacking"], kept["repeated"])


def qrels(given: Setting, part: str) -> dict[str, dict[str, int]]:
    """Judgements of a part: question → gold passage → 1."""
    return read_qrels(given.folder / "qrels" / f"{part}.tsv")


def _asked(sample: Any, names: Mapping[str, str]) -> Asked | None:
    """None: the corpus lacks a gold passage."""
    found = [names.get(letters(chunk)) for chunk in sample.chunks]
    gold = [found[place] for place in sample.support]
    if not gold or None in gold:
        return None
    own = dict.fromkeys(name for name in found if name is not None)
    known = tuple(dict.fromkeys(name for name in gold if name is not None))
    return Asked(sample.id, sample.question, sample.answers, known, tuple(own))


def _part_from_later(parts: dict[str, list[tuple[Record, Asked]]]) -> int:
    """Takes questions out of each part whose text a later part has; returns how many."""
    ids: set[str] = set()
    texts: set[str] = set()
    count = 0
    for part in reversed(PARTS):
        kept = [(record, asked) for record, asked in parts[part] if asked.text not in texts]
        for _, asked in kept:
            if asked.id in ids:
                raise InputError(
                    f"two questions have the id {asked.id!r}; give data whose parts do not overlap."
                )
            ids.add(asked.id)
        texts |= {asked.text for _, asked in kept}
        count += len(parts[part]) - len(kept)
        parts[part] = kept
    return count


def _two_wiki(source: Path) -> tuple[ModuleType, list[Passage], list[Given]]:
    corpus = [
        Passage(record["_id"], record["text"], record["title"])
        for record in _records(source / "open_corpus.jsonl.gz")
    ]
    by_name = {passage.name: passage for passage in corpus}
    test = [_with_gold(record, by_name) for record in _records(source / "open_dev.jsonl.gz")]
    given = [
        Given(TRAIN, _records(source / "train.jsonl.gz")),
        Given(CHOICE, _records(source / "dev.jsonl.gz")),
        Given(TEST, test),
    ]
    return two_wiki, corpus, given


def _with_gold(record: Record, corpus: Mapping[str, Passage]) -> Record:
    """A record without a context, with its gold passages as one.

    One that the corpus lacks is there by its title alone, so that it is missed.
    """
    pages = titled_context.parse_open(record).gold
    found = [corpus.get(page.id, Passage("", "", page.title)) for page in pages]
    titles = list(dict.fromkeys(each.title for each in found))
    context = {each.title: [each.title, [each.text]] for each in found}
    facts = [[title, 0] for title in titles]
    return record | {"supporting_facts": facts, "context": [context[title] for title in titles]}


def _hotpotqa(source: Path) -> tuple[ModuleType, list[Passage], list[Given]]:
    train, test = (
        [r for file in (part, f"{part}_titles") for r in _records(source / f"{file}.jsonl.gz")]
        for part in ("train", "dev")
    )
    order = np.random.default_rng(0).permutation(len(train))
    held = {*order[: min(HELD_OUT, len(train) // 2)].tolist()}
    given = [
        Given(TRAIN, [record for place, record in enumerate(train) if place not in held]),
        Given(CHOICE, [train[place] for place in sorted(held)]),
        Given(TEST, test),
    ]
    pooled: dict[str, Passage] = {}
    for record in (*train, *test):
        for title, sentences in record["context"]:
            passage = Passage("", "".join(sentences).strip(), title)
            pooled.setdefault(letters(passage.whole), passage)
    corpus = [p._replace(name=f"hotpotqa-{n}") for n, p in enumerate(pooled.values())]
    return hotpotqa, corpus, given


def _records(path: Path) -> list[Record]:
    return [record for _, record in read_records(path)]


def _write_lines(path: Path, lines: Iterable[Record]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole(_ready(path), text)


def _ready(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
