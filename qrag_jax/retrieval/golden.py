"""The engine that knows the answers: for bounds from above, and to look for mistakes elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.manifest import Manifest, check_files, read_manifest
from qrag_jax.retrieval.protocol import Corpus, Hits, Queries, Where
from qrag_jax.retrieval.ranking import Row, as_hits, check_k
from qrag_jax.retrieval.saving import finish, replaced_files
from qrag_jax.runtime import bounded_files, bounded_json
from qrag_jax.runtime.typed_json import made
from qrag_jax.runtime.whole_files import reason

ENGINE = "golden"
GOLD = "gold.json"


class GoldenIndex:
    """Gives each question its gold passages, in the order given, and nothing else.

    The scores are 1, 1/2, 1/3 and so on. Passages that a filter leaves out are not given. A
    question that is not known has no hits.

    Args:
        gold: question's text → numbers of its gold passages, each once. Texts are compared with
            white space around them taken off.

    Raises:
        InputError: a number is no passage's or is there twice, or two questions have one text and
            different passages.
    """

    def __init__(self, corpus: Corpus, gold: Mapping[str, Sequence[int] | np.ndarray]) -> None:
        self.corpus = corpus
        self._gold: dict[str, np.ndarray] = {}
        for text, given in gold.items():
            numbers = np.asarray(given, np.int64).reshape(-1)
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(corpus):
                raise InputError(
                    f"the gold passages of the question {text!r} are {numbers.tolist()}; the "
                    f"corpus has the numbers 0 to {len(corpus) - 1}."
                )
            if len(np.unique(numbers)) < len(numbers):
                raise InputError(
                    f"the gold passages of the question {text!r} are {numbers.tolist()}; give each "
                    "passage once."
                )
            before = self._gold.setdefault(text.strip(), numbers)
            if not np.array_equal(before, numbers):
                raise InputError(
                    f"the question {text!r} is there twice with different gold passages; join them."
                )

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The first k gold passages of each question that agree with `where`.

        Raises:
            InputError: k is below 1, or no passage has a field of `where`.
        """
        check_k(k)
        allowed = self.corpus.matching(where) if where else None
        none = np.zeros(0, np.int64)
        rows = []
        for text in queries.texts:
            numbers = self._gold.get(text.strip(), none)
            if allowed is not None:
                numbers = numbers[allowed[numbers]]
            numbers = numbers[:k]
            rows.append(Row(numbers, (1.0 / np.arange(1, len(numbers) + 1)).astype(np.float32)))
        return as_hits(rows, k)

    @classmethod
    def open(cls, folder: Path, corpus: Corpus) -> GoldenIndex:
        """Opens what `save` wrote.

        Raises:
            InputError: there is no such index, or it is damaged or of another corpus.
        """
        manifest = read_manifest(folder, engine=ENGINE, corpus=corpus.digest)
        check_files(folder, manifest)
        try:
            said = bounded_json.load(folder / GOLD, most=bounded_files.MAX_WHOLE_BYTES)
            return cls(corpus, made(dict[str, list[int]], said))
        except (ValueError, OSError) as error:
            raise InputError(
                f"{folder / GOLD} is damaged ({reason(error)}); restore it from a backup, or save "
                "the questions again."
            ) from None

    def save(self, folder: Path) -> None:
        """Writes the questions and the numbers of their passages as JSON.

        Raises:
            InputError: the folder holds an index of another engine or corpus.
            OSError: a file cannot be written.
        """
        gold = {text: numbers.tolist() for text, numbers in self._gold.items()}
        with replaced_files(folder, ENGINE, self.corpus) as new:
            (new / GOLD).write_text(json.dumps(gold) + "\n", encoding="utf-8")
        manifest = Manifest(
            engine=ENGINE,
            corpus=self.corpus.digest,
            count=len(self.corpus),
            metric="1 / place",
        )
        finish(folder, manifest, (GOLD,))
