"""Boolean search: the passages that a query's tree matches, ranked by BM25.

Words are read as BM25 reads them, so that case and, with a stemmer, endings do not matter. What
holds several words, such as `well-known`, is a phrase, and so is a run of Chinese characters. A
word that BM25 leaves out, which is a stop word or too short for its expression, is left out of the
query, too: `the AND cat` and `the OR cat` are `cat`. Within a phrase a stop word stands for any
word: "bank of Norway" finds "bank in Norway", and not "bank Norway". `cardio*` is all words of the
corpus that begin so, stop words left out, joined by OR; they count as what they are stemmed to. A
field has no effect.

Passages that match are ranked by BM25 of the words that are looked for, which are those under no
NOT. Those that match with a score of 0, such as those that `cat OR NOT dog` finds for want of dogs,
come last.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index, Words
from qrag_jax.retrieval.boolean_query import (
    And,
    BooleanError,
    Leaf,
    Node,
    Not,
    Or,
    parse_boolean,
    sought,
)
from qrag_jax.retrieval.manifest import (
    NAME,
    Manifest,
    check_files,
    finish,
    read_manifest,
    replaced_files,
)
from qrag_jax.retrieval.protocol import Corpus, Hits, Queries, Where
from qrag_jax.retrieval.ranking import Row, as_hits, best, check_k
from qrag_jax.retrieval.word_places import Slot, WordPlaces

ENGINE = "boolean"
_BM25 = "bm25"  # folder within the index's
_METRIC = "BM25 of what matches"
_NOTHING = Row(np.zeros(0, np.int64), np.zeros(0, np.float32))


class BooleanIndex:
    """Boolean search over a corpus; see `protocol.Index`. Several threads may search.

    A query that cannot be read (`boolean_query.BooleanError`) has no hits, for it shall not end a
    batch of others: read it with `parse_boolean` before, to tell its writer. A query has no hits
    either if of what it looks for nothing is left: `the`, and also `the NOT cat`.
    """

    def __init__(self, ranking: BM25Index, places: WordPlaces) -> None:
        """Use `build`, `over` or `open`."""
        self.corpus, self.config = ranking.corpus, ranking.config
        self._ranking, self._places = ranking, places

    @classmethod
    def build(cls, corpus: Corpus, config: BM25Config | None = None) -> BooleanIndex:
        """Reads the corpus twice; see `BM25Index.build`."""
        return cls.over(BM25Index.build(corpus, config))

    @classmethod
    def over(cls, ranking: BM25Index) -> BooleanIndex:
        """In memory, over an index that there is; reads its corpus once (`WordPlaces.of`)."""
        try:
            return cls(ranking, WordPlaces.of(ranking))
        except KeyError as error:
            raise InputError(
                f"the index of words lacks {error}, which a passage has: another version of "
                "PyStemmer has built it; build it again with this one."
            ) from None

    @classmethod
    def open(cls, folder: Path, corpus: Corpus) -> BooleanIndex:
        """Opens what `save` wrote; the arrays are mapped, the words are read into memory."""
        manifest = read_manifest(folder, engine=ENGINE, corpus=corpus.digest, metric=_METRIC)
        check_files(folder, manifest)
        ranking = BM25Index.open(folder / _BM25, corpus)
        try:
            places = WordPlaces.open(folder, len(corpus), len(ranking.vocabulary))
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise InputError(
                f"a file in {folder} is damaged ({error}); restore it from a backup, or build the "
                "index again."
            ) from None
        if manifest.settings != _settings(ranking):
            raise InputError(
                f"{folder / NAME} has other settings of words than {folder / _BM25 / NAME}; "
                "restore them from a backup, or build the index again."
            )
        return cls(ranking, places)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k best passages that match and agree with `where`; of equal scores by number."""
        check_k(k)
        words = Words(self.config)
        allowed = self.corpus.matching(where) if where else None
        try:
            return as_hits([self._row(text, words, k, allowed) for text in queries.texts], k)
        except IndexError:  # the arrays are mapped: to look at all of them would read them
            raise InputError(
                "the index of word places names passages or words that are not there; build it "
                "again."
            ) from None

    def save(self, folder: Path) -> None:
        """Writes plain .npy files and JSON, those of BM25 into the folder `bm25`; no pickle.

        Raises:
            OSError: a file cannot be written.
        """
        with replaced_files(folder, ENGINE, self.corpus) as new:
            self._places.save(new)
            files = tuple(sorted(path.name for path in new.iterdir()))
            (folder / NAME).unlink(missing_ok=True)  # no index until both parts are written
            self._ranking.save(folder / _BM25)
        manifest = Manifest(
            engine=ENGINE,
            corpus=self.corpus.digest,
            count=len(self.corpus),
            metric=_METRIC,
            settings=_settings(self._ranking),
        )
        finish(folder, manifest, files)

    def _row(self, text: str, words: Words, k: int, allowed: np.ndarray | None) -> Row:
        try:
            node = parse_boolean(text)
        except BooleanError:
            return _NOTHING
        slots = [slot for leaf in sought(node) for slot in self._slots(leaf, words)]
        mask = self._matching(node, words)
        if mask is None or not slots:
            return _NOTHING
        numbers = np.flatnonzero(mask if allowed is None else mask & allowed)
        scores = self._scores([int(word) for slot in slots for word in slot.words])
        return best(numbers, scores[numbers], k)

    def _scores(self, words: list[int]) -> np.ndarray:
        return self._ranking.scores(words) if words else np.zeros(len(self.corpus), np.float32)

    def _matching(self, node: Node, words: Words) -> np.ndarray | None:
        """bool `[passages]`; None: all words of the node are left out."""
        if isinstance(node, Not):
            inner = self._matching(node.node, words)
            return None if inner is None else ~inner
        if isinstance(node, And | Or):
            each = (self._matching(part, words) for part in node.nodes)
            masks = [mask for mask in each if mask is not None]
            join = np.logical_and if isinstance(node, And) else np.logical_or
            return join.reduce(masks) if masks else None
        slots = self._slots(node, words)
        if len(slots) > 1:
            return self._places.in_a_row(slots)
        return self._places.having(slots[0].words) if slots else None

    def _slots(self, leaf: Leaf, words: Words) -> list[Slot]:
        """The places that are not left out, the first one being 0."""
        found: list[Slot] = []
        before = 0
        *begun, last = leaf.text.split("*")
        for piece, is_begun in [*((piece, True) for piece in begun), (last, False)]:
            forms = words.forms(piece)
            for place, form in enumerate(forms, before):
                # Else the asterisk is behind no word.
                ends = place == before + len(forms) - 1 and words.normalised(piece).endswith(form)
                if is_begun and ends:
                    found.append(Slot(place, self._places.beginning(form)))
                elif (word := words.word(form)) is not None:
                    number = self._ranking.vocabulary.get(word)
                    known = [] if number is None else [number]
                    found.append(Slot(place, np.array(known, np.int64)))
            before += len(forms)
        return [slot._replace(place=slot.place - found[0].place) for slot in found]


def _settings(ranking: BM25Index) -> dict[str, Any]:
    return {"words": dataclasses.asdict(ranking.config)}
