"""Plain searches: by words, by vectors, both, and with words of what is found first.

None of them is trained here. The index of a setting has the words and the vectors of MiniLM; the
command `qrag_jax.index` makes it, as a user does.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.which_cases.feedback_terms import (
    DOCUMENTS,
    expanded,
    feedback_of,
    feedback_terms,
    passages_with,
)
from benchmarks.which_cases.found import MOST, Asking, Found, by_turns, fused, read_list
from benchmarks.which_cases.measured import once
from benchmarks.which_cases.settings import Asked, Setting
from qrag_jax.retrieval.bm25 import BM25Config, Words
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.retrieval.opening import BM25, CORPUS, EXACT, HYBRID, IndexAt
from qrag_jax.retrieval.single_step import SingleStepSearch
from qrag_jax.runtime.minilm import MINILM
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.plain_search import PlainEncoder, open_plain

Search = Callable[[Sequence[str], int], list[list[Hit]]]
REPEATS = 3  # of a timed search; the fastest counts
ROW_TOKENS = 256  # of a passage, as MiniLM's folder says
_HOP, _WORDS = 3, 64  # passages of a first search; words of a query with a passage, as LeReT's
_SPECIAL = 2  # tokens around a question


def index(given: Setting, folder: Path, encoder: str = "") -> Path:
    """The index of a corpus; made by the command if it is not there.

    Args:
        folder: of the index; what it cost is kept in it.
        encoder: what embeds the passages; "": words are indexed.
    """
    of = [f"--corpus={given.folder / 'corpus.jsonl'}", f"--index={folder}"]
    how = [f"--encoder={encoder}", f"--max_chunk_tokens={ROW_TOKENS}"]
    how = how if encoder else [f"--engine={BM25}"]
    once(folder, EXACT if encoder else BM25, "qrag_jax.index", *of, *how)
    return folder


def index_of(given: Setting, engines: Sequence[str]) -> Path:
    """The setting's own index, which has these engines: BM25 or EXACT, by MiniLM."""
    folder = given.folder / "index"
    for engine in engines:
        index(given, folder, "" if engine == BM25 else MINILM)
    return folder


def search_of(folder: Path, engine: str, encoder: str = MINILM) -> SingleStepSearch:
    """Searches an index once for each question."""
    at = IndexAt(folder, engine)
    by = PlainEncoder(encoder, max_tokens=ROW_TOKENS)
    return open_plain(at, None if engine == BM25 else by)


def bm25(given: Setting) -> Found:
    """Words."""
    folder = index_of(given, (BM25,))
    return searched(given, search_of(folder, BM25).search, size(folder, BM25))


def minilm(given: Setting) -> Found:
    """Vectors of MiniLM as it is."""
    folder = index_of(given, (EXACT,))
    return by_vectors(given, folder, MINILM)


def by_vectors(given: Setting, folder: Path, encoder: str) -> Found:
    """The vectors of an encoder, which embedded the index."""
    search = search_of(folder, EXACT, encoder)
    return searched(given, search.search, size(folder, EXACT), tokens(given.test, encoder))


def hybrid(given: Setting) -> Found:
    """Words and vectors, fused by their ranks."""
    folder = index_of(given, (BM25, EXACT))
    search = search_of(folder, HYBRID)
    both = size(folder, BM25, EXACT)
    return searched(given, search.search, both, tokens(given.test, MINILM))


def expansion(given: Setting) -> Found:
    """Words, and with them those that tell the first passages found from the rest."""
    folder = index_of(given, (BM25,))
    first, corpus, config = search_of(folder, BM25), StoredCorpus(folder / CORPUS), BM25Config()
    words = Words(config)

    def search(texts: Sequence[str], k: int) -> list[list[Hit]]:
        found = first.search(texts, DOCUMENTS)
        feedback = [feedback_of((f"{h.title} {h.text}" for h in own), words) for own in found]
        known = passages_with(corpus, {w for each in feedback for w in each.weights}, config)
        queries = [
            expanded(text, feedback_terms(text, each, known, len(corpus), words))
            for text, each in zip(texts, feedback, strict=True)
        ]
        return first.search(queries, k)

    found = searched(given, search, size(folder, BM25), searches=2.0)
    note = "the words of the whole corpus are counted once for all questions, which is in its time"
    return Found(found.lists, found.asking, found.index_bytes, note)


def second_hop(given: Setting) -> Found:
    """Words of the question, and then of the question with the passage found first.

    Of the first search three passages, as LeReT's rows have them, and of both in turns.
    """
    folder = index_of(given, (BM25,))
    hops = _TwoHops(search_of(folder, BM25))
    return searched(given, hops.search, size(folder, BM25), searches=2.0)


def second_hop_by_vectors(given: Setting, folder: Path, encoder: str) -> Found:
    """The same by the vectors of an encoder, which embedded the index."""
    hops = _TwoHops(search_of(folder, EXACT, encoder))
    found = searched(given, hops.search, size(folder, EXACT), searches=2.0)
    read = tokens(given.test, encoder) + tokens_of(hops.longer, encoder)
    return dataclasses.replace(found, asking=dataclasses.replace(found.asking, encoder_tokens=read))


def with_words(given: Setting, found: Found) -> Found:
    """What was found, fused by ranks with what words find for the question."""
    words = bm25(given)
    lists = {name: fused((own, words.lists[name])) for name, own in found.lists.items()}
    times = (found.asking.milliseconds, words.asking.milliseconds)
    asking = dataclasses.replace(
        found.asking,
        milliseconds=None if None in times else sum(t for t in times if t is not None),
        searches=found.asking.searches + words.asking.searches,
    )
    return Found(lists, asking, found.index_bytes + words.index_bytes)


class _TwoHops:
    """Searches twice.

    Attributes:
        longer: what it searched for in the second place, of each question asked last.
    """

    def __init__(self, first: SingleStepSearch) -> None:
        self.first = first
        self.longer: list[str] = []

    def search(self, texts: Sequence[str], k: int) -> list[list[Hit]]:
        found = self.first.search(texts, _HOP)
        self.longer = [
            " ".join(f"{text} {own[0].title} {own[0].text}".split()[:_WORDS]) if own else text
            for text, own in zip(texts, found, strict=True)
        ]
        more = self.first.search(self.longer, k)
        return [_in_turns(own, then) for own, then in zip(found, more, strict=True)]


def _in_turns(*searches: Sequence[Hit]) -> list[Hit]:
    by_name = {hit.id: hit for found in searches for hit in found}
    return [by_name[name] for name in by_turns([hit.id for hit in found] for found in searches)]


def searched(
    given: Setting,
    search: Search,
    index_bytes: int,
    encoder_tokens: float = 0.0,
    searches: float = 1.0,
) -> Found:
    """What a search finds for the test questions, and how long it takes when it is warm."""
    texts = [asked.text for asked in given.test]
    found = search(texts, MOST)  # compiles what it needs
    milliseconds = min(_milliseconds(search, texts) for _ in range(REPEATS))
    lists = {
        asked.id: read_list(hit.id for hit in own)
        for asked, own in zip(given.test, found, strict=True)
    }
    asking = Asking(milliseconds, encoder_tokens=encoder_tokens, searches=searches)
    return Found(lists, asking, index_bytes)


def _milliseconds(search: Search, texts: Sequence[str]) -> float:
    """A question, all asked at once."""
    began = time.perf_counter()
    search(texts, MOST)
    return 1e3 * (time.perf_counter() - began) / len(texts)


def tokens(questions: Sequence[Asked], encoder: str) -> float:
    """Mean tokens of a question, special ones included."""
    return tokens_of([asked.text for asked in questions], encoder)


def tokens_of(texts: Sequence[str], encoder: str) -> float:
    """Mean tokens of a text, special ones included."""
    ids = PassageEncoder.of_folder(encoder).tokenizer.encode(texts)
    return sum(len(own) + _SPECIAL for own in ids) / len(ids)


def size(folder: Path, *engines: str) -> int:
    """Bytes of an index's files, without the texts of the corpus."""
    files = (path for engine in engines for path in (folder / engine).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())
