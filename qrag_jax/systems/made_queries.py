"""The queries of the invented world that a DeepRetrieval run rewrites, and their passages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from qrag_jax.data.generators.synthetic import Split
from qrag_jax.data.generators.talkative import BLOCK, TalkativeQuestion, talkative_question
from qrag_jax.data.judged_query import JudgedQuery
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.systems.deepretrieval_config import RewriteConfig


@dataclasses.dataclass(frozen=True)
class MadeQueries:
    """The queries that are made here; those of the test are of another world, as are dev's."""

    config: RewriteConfig

    @functools.cached_property
    def questions(self) -> list[TalkativeQuestion]:
        """Training questions: all whose passages are searched."""
        queries = self.config.queries
        return [self._one("train", number) for number in range(queries.made_corpus)]

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
        more = -(len(test) + len(dev)) % BLOCK
        last = len(test) + len(dev)
        filled = [self._one("dev", last + number) for number in range(more)]
        for each in (*self.questions, *test, *dev, *filled):
            yield from (Passage(*document) for document in each.documents)

    @functools.cached_property
    def _others(self) -> tuple[list[TalkativeQuestion], list[TalkativeQuestion]]:
        queries = self.config.queries
        count = queries.made_test + queries.held_out
        made = [self._one("dev", number) for number in range(count)]
        return made[: queries.made_test], made[queries.made_test :]

    def _one(self, split: Split, number: int) -> TalkativeQuestion:
        queries = self.config.queries
        return talkative_question(queries.made_seed, split, number, queries.clauses)
