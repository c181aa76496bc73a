"""A retriever over a corpus gives the same hits whatever computes it, and those of the trainer."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from qrag_jax import LoadSettings, Retriever, score_hits
from qrag_jax.errors import InputError
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.retrieval.towers import TorchTower
from qrag_jax.runtime.retriever_config import NAME, RetrieverConfig
from qrag_jax.systems.retriever import Endpoints
from tests.entry_points import ROOT, Commands, log_rows
from tests.json_server import Call, listening
from tests.reference import chunk_positions, rotated
from tests.support.worlds import write_lines
from tests.systems.corpora import records, write_corpus_file, write_tower
from tests.systems.parts import chunks_of

sentence_transformers = pytest.importorskip("sentence_transformers")
pytest.importorskip("faiss")


TOLERANCE = 2e-5
FLOAT32 = LoadSettings(dtype="float32")


class Search:
    """A greedy search as a user writes it, from the folder and `tests.reference`."""

    def __init__(self, folder: Path) -> None:
        self.config = RetrieverConfig.read(folder)
        self.config.check_weights(folder)
        self.state, self.chunk = (
            sentence_transformers.SentenceTransformer(str(folder / tower.folder), device="cpu")
            for tower in (self.config.state, self.config.chunk)
        )

    def first(self, text: str, tokens: int) -> str:
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        places = self.state.tokenizer(text, **options)["offset_mapping"]
        return text[: places[tokens - 1][1]] if len(places) > tokens else text

    def text(self, question: str, chunks: list[str], taken: list[int]) -> str:
        config = self.config
        order = sorted(taken) if config.sort_by_index else taken
        parts = [self.first(chunks[i], config.max_chunk_tokens_in_state) for i in order]
        return config.separator.join([self.first(question, config.max_question_tokens), *parts])

    def play(self, question: str, chunks: list[str]) -> tuple[list[int], list[float]]:
        rules = self.config.search
        vectors, stop = self.chunk.encode(chunks), self.chunk.encode("")
        taken, values = list[int](), list[float]()
        least = -math.inf if rules.stop_threshold is None else rules.stop_threshold
        while len(taken) < min(rules.max_steps, len(chunks)):
            state = self.state.encode(self.text(question, chunks, taken))
            places = chunk_positions(self.config.positions.kind, taken, len(chunks))
            q = np.array([rotated(*each) @ state for each in zip(vectors, places)])
            q[taken] = -np.inf
            best = int(q.argmax())
            if q[best] <= least or (rules.stop_action and stop @ state > q[best]):
                break
            taken.append(best)
            values.append(float(q[best]))
        return taken, values


class Task(NamedTuple):
    """Questions, the chunks of all their documents, each once, and an index of these."""

    questions: list[str]
    texts: list[str]
    index: Path
    expected: list[tuple[list[int], list[float]]]  # by a user's own search of a few lines


def write_corpus(path: Path, texts: list[str]) -> Path:
    rows = ({"id": f"p{n}", "text": text, "page": n % 3} for n, text in enumerate(texts))
    return write_lines(path, rows)


@pytest.fixture(scope="module")
def task(
    scored_run: Path, exported: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Task:
    cache = commands.environment["QRAG_CACHE"]
    questions = [row["question"] for row in log_rows(scored_run)]
    chunks = [text for question in questions for text in chunks_of(scored_run, question, cache)]
    texts = list(dict.fromkeys(chunks))
    folder = tmp_path_factory.mktemp("task")
    corpus = write_corpus(folder / "corpus.jsonl", texts)
    Retriever.load(exported, FLOAT32).index(corpus, folder / "index")
    search = Search(exported)
    expected = [search.play(question, texts) for question in questions]
    return Task(questions, texts, folder / "index", expected)


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[Endpoints]:
    """A server of embeddings with both real towers."""
    towers = {name: TorchTower(exported / name, 0) for name in ("state", "chunk")}

    def answer(call: Call) -> tuple[int, dict[str, Any]]:
        asked = json.loads(call.body)
        vectors = towers[asked["model"]](asked["input"])
        rows = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(vectors)]
        return 200, {"object": "list", "data": rows[::-1], "usage": {"prompt_tokens": 1}}

    with listening(answer) as url:
        yield Endpoints(f"{url}/v1", wait_limit=1.0)


def check(found: list[list[Hit]], expected: list[tuple[list[int], list[float]]]) -> None:
    for hits, (taken, values) in zip(found, expected, strict=True):
        assert [hit.id for hit in hits] == [f"p{n}" for n in taken]
        assert [hit.step for hit in hits] == list(range(1, len(taken) + 1))
        assert [hit.metadata for hit in hits] == [{"page": n % 3} for n in taken]
        np.testing.assert_allclose([hit.score for hit in hits], values, atol=TOLERANCE)


def test_all_backends_and_engines_give_the_same_hits(
    exported: Path, scored_run: Path, server: Endpoints, task: Task
) -> None:
    for folder, settings, engine in (
        (exported, FLOAT32, "exact"),
        (scored_run, LoadSettings(dtype="float32", checkpoint="last"), "scan"),
        (exported, LoadSettings(backend="torch", device="cpu"), "faiss"),
        (exported, LoadSettings(backend="endpoint", endpoints=server), "exact"),
    ):
        retriever = Retriever.load(folder, settings)
        retriever.open(task.index, engine)
        check(retriever.search(task.questions), task.expected)
        check([retriever.search(task.questions[0])], task.expected[:1])
        pages = retriever.search(task.questions, where={"page": [0, 2]})
        assert {hit.metadata["page"] for hits in pages for hit in hits} == {0, 2}
    best = Retriever.load(scored_run, LoadSettings(dtype="float32", checkpoint="best"))
    with pytest.raises(InputError, match="another tower"):
        best.open(task.index)


def test_the_settings_of_the_file_are_searched(exported: Path, task: Task, tmp_path: Path) -> None:
    """Order, positions, STOP and threshold, as a search of a few lines reads them."""
    folder = Path(shutil.copytree(exported, tmp_path / "out"))
    fields = json.loads((folder / NAME).read_text())
    fields["sort_by_index"] = True
    fields["positions"]["kind"] = "relative"
    least = float(np.median(Search(folder).play(task.questions[0], task.texts)[1]))
    for search in ({"stop_action": True}, {"stop_action": False, "stop_threshold": least}):
        fields["search"] |= search
        (folder / NAME).write_text(json.dumps(fields))
        retriever = Retriever.load(folder, LoadSettings(backend="torch", device="cpu"))
        retriever.open(task.index)
        expected = [Search(folder).play(question, task.texts) for question in task.questions]
        check(retriever.search(task.questions), expected)


def test_counts_copies_and_threads(exported: Path, task: Task, tmp_path: Path) -> None:
    retriever = Retriever.load(exported, FLOAT32)
    retriever.open(task.index, "scan")
    plain = retriever.search(task.questions)
    assert retriever.search(task.questions, topk=1) == [hits[:1] for hits in plain]
    assert retriever.search(task.questions, [1, 2] * 2, topk=9) == [
        hits[: 1 + place % 2] for place, hits in enumerate(plain)
    ]
    five = retriever.search(task.questions, topk=5)
    assert [[hit.step for hit in hits] for hits in five] == [[1, 1, 1, 2, 2]] * 4
    with pytest.raises(InputError, match="topk"):
        retriever.search("where?", topk=0)
    again = pickle.loads(pickle.dumps(retriever))  # noqa: S301  (our own)
    assert again.search(task.questions) == plain
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(retriever.search, task.questions * 3)] == plain * 3
    other = copy.deepcopy(retriever)
    other.index(write_corpus(tmp_path / "one.jsonl", task.texts[:6]), tmp_path / "index")
    assert other.search(task.questions) != plain
    assert retriever.search(task.questions) == plain


def test_words_of_the_question_count_in_every_step(
    exported: Path, task: Task, tmp_path: Path
) -> None:
    folder = shutil.copytree(task.index, tmp_path / "index")
    weighted = Retriever.load(exported, LoadSettings(dtype="float32", bm25_weight=1e4))
    with pytest.raises(InputError, match="bm25"):
        weighted.open(folder)
    words = Retriever.load("bm25")
    words.index(task.index.with_name("corpus.jsonl"), folder)
    weighted.open(folder)
    by_words = words.search(task.questions, topk=2)
    assert any(by_words)
    for hits, best in zip(weighted.search(task.questions), by_words, strict=True):
        assert [hit.id for hit in hits][: len(best)] == [hit.id for hit in best]
    slightly = Retriever.load(exported, LoadSettings(dtype="float32", bm25_weight=1e-9))
    slightly.open(folder, "scan")
    check(slightly.search(task.questions), task.expected)


def test_encoders_and_words_search_once(tmp_path: Path) -> None:
    corpus, tower = write_corpus_file(tmp_path / "c.jsonl", 60), write_tower(tmp_path / "tower")
    retriever = Retriever.load(tower, FLOAT32)
    separator = retriever.title_separator
    texts = [f"{row['title']}{separator}{row['text']}" for row in records(60)]
    texts = [text.removeprefix(separator) for text in texts]
    retriever.index(corpus, tmp_path / "index")
    question = "the silver clock of the station"
    scores = retriever.encode(texts) @ retriever.encode([question], questions=True)[0]
    best = np.argsort(-scores, kind="stable")[:10]
    hits = retriever.search(question)
    assert [hit.id for hit in hits] == [f"p{n}" for n in best]
    np.testing.assert_allclose([hit.score for hit in hits], scores[best], atol=TOLERANCE)
    again = pickle.loads(pickle.dumps(retriever))  # noqa: S301  (our own)
    assert again.search([question], topk=3) == [hits[:3]]
    words = Retriever.load("bm25")
    words.index(corpus, tmp_path / "index")
    by_words = words.search(question, topk=5)
    assert all({"silver", "clock", "station"} & {*hit.text.lower().split()} for hit in by_words)
    for wrong in (
        lambda: words.encode([question]),
        lambda: words.search(question, 2),
        lambda: retriever.search(question, beam=2),
        lambda: words.open(tmp_path / "index", "exact"),
        lambda: Retriever.load(tmp_path / "nothing"),
        lambda: Retriever.load("minilm", LoadSettings(backend="torch")),
    ):
        with pytest.raises(InputError):
            wrong()
    found = {"a": hits, "b": by_words, "c": hits}
    qrels = {"a": {hits[1].id: 1, "p-": 1}, "b": {by_words[0].id: 2}, "d": {"p0": 1}}
    assert score_hits(found, qrels, ["recall@2", "rr"])["recall@2"][0] == (0.5 + 1) / 2
    assert score_hits(found, qrels, ["recall@2", "rr"])["rr"][0] == (0.5 + 1) / 2


WITHOUT_JAX = """
import json, sys
import qrag_jax
assert not {"numpy", "jax", "torch"} & sys.modules.keys(), "import qrag_jax is not cheap"
from qrag_jax import LoadSettings, Retriever
retriever = Retriever.load(sys.argv[1], LoadSettings(backend="torch", device="cpu"))
retriever.open(sys.argv[2])
print(json.dumps([[hit.id for hit in hits] for hits in retriever.search(json.loads(sys.argv[3]))]))
assert not [name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "flax")]
"""


def test_an_export_is_searched_without_jax(exported: Path, task: Task) -> None:
    arguments = [str(exported), str(task.index), json.dumps(task.questions)]
    command = [sys.executable, "-c", WITHOUT_JAX, *arguments]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    output = subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr[-3000:]
    assert json.loads(output.stdout) == [[f"p{n}" for n in taken] for taken, _ in task.expected]
