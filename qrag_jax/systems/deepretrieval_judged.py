"""The queries of a DeepRetrieval run, on the documents that are searched for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from qrag_jax.data.files.queries import JudgedQuery, Origin, check_in_corpus
from qrag_jax.data.sample import Split
from qrag_jax.data.scripted import BLOCK, TalkativeQuestion, talkative_questions
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.runtime.run import log
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.rewrite_search import (
    Collections,
    RewriteSearchConfig,
    SearchLibrary,
    ids_in,
)


def on_corpora(
    tasks: Sequence[RewriteTask],
    field: str,
    library: SearchLibrary,
    search: RewriteSearchConfig,
    folders: Mapping[str, str],
) -> list[RewriteTask]:
    """The tasks of which their collection has a relevant document; a service is not asked.

    Args:
        field: that names the queries, such as "config.queries.train".
        folders: of collections in BEIR's layout, by their names.
    """
    if not isinstance(library, Collections):
        return [*tasks]
    kept: list[RewriteTask] = []
    for name in dict.fromkeys(each.collection for each in tasks):
        own = [each for each in tasks if each.collection == name]
        if name and name not in folders:  # made here, with their passages
            kept += own
            continue
        judged = [JudgedQuery(each.id, each.question, each.grades) for each in own]
        needed = (document for each in judged for document, _ in each.grades)
        known = ids_in(library.by_name[name].corpus, needed)
        origin = _origin(field, search, folders.get(name, ""))
        found = check_in_corpus(judged, known, origin, search.max_missing_share)
        if found.summary:
            log(f"{name or 'queries'}: {found.summary}")
        there = {id(each) for each in found.queries}  # query ids of two parts may be alike
        kept += [task for task, each in zip(own, judged, strict=True) if id(each) in there]
    return kept


def check_depths(library: SearchLibrary, k: int) -> None:
    """Refuses a K of training that no ranking can have; recall would count all that match."""
    if not isinstance(library, Collections):
        return
    for name, each in library.by_name.items():
        if (many := len(each.corpus)) < k:
            of = f"the corpus of {name}" if name else "the corpus"
            raise InputError(
                f"config.reward.k is {k}, but {of} has {many} document(s), so no ranking is that "
                f"long; use {many} or less, or name a larger corpus."
            )


def _origin(field: str, search: RewriteSearchConfig, folder: str) -> Origin:
    """Of the queries of a folder in BEIR's layout; "": of those of files of rows."""
    if folder:
        return Origin(
            field,
            f"the corpus of {folder}",
            f"put the corpus that they are about into that folder, or name another in {field}",
        )
    named = "config.search.index" if search.index else "config.search.corpus"
    path = search.index or search.corpus
    return Origin(field, f"{named}, {path},", f"give the corpus that they are about in {named}")


@dataclasses.dataclass(frozen=True)
class MadeQueries:
    """The queries that are made here; those of the test are of another world, as are dev's."""

    config: RewriteConfig

    @functools.cached_property
    def questions(self) -> list[TalkativeQuestion]:
        """Training questions: all whose passages are searched."""
        return self._made("train", 0, self.config.queries.made_corpus)

    def train(self) -> list[JudgedQuery]:
        """Training queries."""
        return [each.judged for each in self.questions[: self.config.queries.made_train]]

    def dev(self) -> list[JudgedQuery]:
        """Those that choose the best checkpoint."""
        return [each.judged for each in self._others[1]]

    def test(self) -> list[JudgedQuery]:
        """Those that `evaluate` scores."""
        return [each.judged for each in self._others[0]]

    def passages(self) -> Iterator[Passage]:
        """Those of all questions, and of all in the blocks of the others."""
        test, dev = self._others
        last = len(test) + len(dev)
        filled = self._made("dev", last, last + -last % BLOCK)
        for each in (*self.questions, *test, *dev, *filled):
            yield from (Passage(*document) for document in each.documents)

    @functools.cached_property
    def _others(self) -> tuple[list[TalkativeQuestion], list[TalkativeQuestion]]:
        queries = self.config.queries
        made = self._made("dev", 0, queries.made_test + queries.held_out)
        return made[: queries.made_test], made[queries.made_test :]

    def _made(self, split: Split, first: int, end: int) -> list[TalkativeQuestion]:
        queries = self.config.queries
        numbers = range(first, end)
        return talkative_questions(queries.made_seed, split, numbers, queries.clauses)
