"""What is pinned besides trainings: vectors, rankings and rewards, each by the public way to it."""

from __future__ import annotations

import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from qrag_jax.feedback.rubric import PRESETS, score
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.retrieval.index_folder import BM25, BOOLEAN, EXACT, FAISS, HYBRID, SCAN, IndexAt
from qrag_jax.serving.searcher import Ask
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.retriever import PlainEncoder, open_searcher
from tests.support.small_models import write_small_model
from tests.support.stored_episodes import closed_in_process, stories

Numbers = dict[str, list[float | None]]
ENGINES = (EXACT, SCAN, FAISS, BM25, HYBRID, BOOLEAN)
PASSAGES, QUESTIONS, HITS, ENTRIES, EPISODES = 60, 8, 5, 8, 200
FLOAT32 = EncoderConfig(dtype="float32")


def embeddings(family: str, folder: Path) -> Numbers:
    """The first entries of passages' vectors by a small random model of the family."""
    encoder = _model(family, folder)
    index_corpus(_corpus(folder), folder / "index", encoder)
    index = IndexAt(folder / "index", SCAN).open_vectors()
    vectors = index.vectors(range(QUESTIONS))
    return {f"vector {i}": row[:ENTRIES].tolist() for i, row in enumerate(vectors)}


def rankings(folder: Path) -> Numbers:
    """Ids and scores of the best passages of fixed questions, by every engine."""
    source, out = _corpus(folder), folder / "index"
    index_corpus(source, out, _model("bert", folder))
    index_corpus(source, out, None, IndexSettings(engine=BM25))
    draw, numbers = random.Random(1), {}
    questions = [_text(draw, 3) for _ in range(QUESTIONS)]
    for engine in ENGINES:
        encoder = None if engine in (BM25, BOOLEAN) else PlainEncoder(f"{folder}/bert", FLOAT32)
        searcher = open_searcher(IndexAt(out, engine), encoder=encoder)
        asked = (
            [text.replace(" ", " OR ") for text in questions] if engine == BOOLEAN else questions
        )
        for i, hits in enumerate(searcher.search([Ask(text, count=HITS) for text in asked])):
            assert isinstance(hits, list), hits
            numbers[f"{engine}: ids of {i}"] = [float(hit.id) for hit in hits]
            numbers[f"{engine}: scores of {i}"] = [hit.score for hit in hits]
    return numbers


def rewards(folder: Path) -> Numbers:
    """The rewards of stored episodes, right and wrong ones, by every preset of RLVR's rubric."""
    told = stories(EPISODES)
    texts = (text for story in told for text in (story.task.question, *story.texts))
    sizes = TinyLMConfig(layers=1, hidden=32, heads=2, key_heads=1, intermediate=32, vocab=600)
    write_tiny_lm(folder / "model", texts, sizes, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    closed = closed_in_process(tokenizer, told)
    return {
        name: [
            rubric.reward(score(end, story.task), story.task.hops)
            for end, story in zip(closed, told, strict=True)
        ]
        for name, rubric in PRESETS.items()
    }


def _model(family: str, folder: Path) -> PassageEncoder:
    path = write_small_model(family, folder / family, max_position_embeddings=66)
    return PassageEncoder.of_folder(str(path), FLOAT32)


def _corpus(folder: Path) -> Path:
    draw = random.Random(0)
    rows = ({"id": str(i), "text": _text(draw, 4 + i % 9)} for i in range(PASSAGES))
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _text(draw: random.Random, words: int) -> str:
    known = ("the", "moth", "query", "passage", "fjord", "oslo", "red", "born", "long", "king")
    return " ".join(draw.choice(known) for _ in range(words))
