"""The ways to write a query that a DeepRetrieval run is compared with, and how each is played.

Beside the checkpoint are: the weights at the end of the script (SFT alone), the untrained ones, the
best of some sampled episodes by the judgements, which nobody knows beforehand, the original query,
its words without function words, pseudo-relevance expansion (`retrieval.feedback_terms`), and a
passage by the untrained model (`query_rewriting.pseudo_document`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from qrag_jax.data.generators.dropped_words import content_words
from qrag_jax.environments.query_rewriting.prompt import RewritePrompt
from qrag_jax.environments.query_rewriting.pseudo_document import PROMPT, REPEATS, PassageAgent
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import played_row, searched_row
from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index, Words
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.feedback_terms import (
    DOCUMENTS,
    expanded,
    feedback_of,
    feedback_terms,
    passages_with,
)
from qrag_jax.retrieval.opening import BOOLEAN, OF_WORDS
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import RL, SCRIPT
from qrag_jax.systems.rewrite_search import Collections
from qrag_jax.systems.saved_token_run import SavedWeights, digest_of_weights
from qrag_jax.systems.scored_ways import NOT_KEPT, Way
from qrag_jax.systems.token_system import EVALUATED

DRAWS = 8
BEST = f"best of {DRAWS} by the judgements, an oracle"
_ROOM = 16  # tokens that a passage needs


@dataclasses.dataclass(frozen=True)
class Ways:
    """All ways to write some queries.

    Attributes:
        system: the run's.
        tasks: the queries.
        stop: looked at while they are played.
    """

    system: DeepRetrieval
    tasks: Sequence[RewriteTask]
    stop: StopSignal

    def all(self, checkpoint: str) -> list[Way[RewriteRow]]:
        """The ways, the run's own first.

        Args:
            checkpoint: "best" or "last".

        Raises:
            InputError: the run has no sound checkpoint.
        """
        config, saved = self.system.config, SavedWeights(self.system)
        own, end = saved.checkpoint(checkpoint), config.first_steps
        by = digest_of_weights(own.params)

        def imitated() -> list[RewriteRow] | str:
            if not {SCRIPT, RL} <= {*config.stages}:
                return f"the run has the stage {config.stages[0]} alone"
            if own.step == end:
                return f"the {checkpoint} checkpoint is that of its end"
            kept = saved.after(end)
            return NOT_KEPT if kept is None else self._by(kept)

        def best() -> list[RewriteRow] | str:
            if not config.sampling.temperature:
                return "config.sampling.temperature is 0, so all draws are the same"
            return self._by(own.params, DRAWS)

        return [
            Way(own.name, own.told, lambda: self._by(own.params), by=by),
            Way(f"script-{end}", f"SFT alone, step {end}", imitated),
            Way("untrained", "untrained", lambda: self._by(self.system.untrained)),
            Way(f"{own.name}-best-of-{DRAWS}", BEST, best, draws=DRAWS, by=by),
            Way("original", "original query", lambda: self._searched(None), by_model=False),
            Way(
                "content_words",
                "without function words",
                lambda: self._searched([_content(task.question) for task in self.tasks]),
                by_model=False,
            ),
            Way("expansion", "pseudo-relevance expansion", self._expansion, by_model=False),
            Way("passage", "pseudo-document by the untrained model", self._passages),
        ]

    def _by(self, params: Any, draws: int = 1) -> list[RewriteRow]:
        """Rewritings by these weights; several draws are sampled."""
        system, config = self.system, self.system.config
        greedy = config.eval.greedy and draws == 1
        episodes = system.play(params, self.tasks, self.stop, greedy=greedy, draws=draws)
        speech, form = system.inputs.speech, config.writing.kind.form
        return [
            played_row(self.tasks[place // draws], episode, speech, form, place % draws)
            for place, episode in enumerate(episodes)
        ]

    def _passages(self) -> list[RewriteRow] | str:
        system, config = self.system, self.system.config
        if not config.model.path:
            return "a tiny model that was made here knows nothing to write"
        prompt, speech = RewritePrompt(prompts.load(PROMPT)), system.inputs.speech
        longest = max(self.tasks, key=lambda task: len(task.question))
        tokens = len(speech.scaffold.opening(prompt.messages(longest)))
        if tokens + _ROOM > config.sampling.room:
            return (
                f"its prompt has {tokens} tokens, and config.sampling.room, "
                f"{config.sampling.room}, leaves no passage room"
            )
        engine = config.search.engine
        agent = PassageAgent(
            prompt,
            config.eval.depth,
            repeats=REPEATS if engine in OF_WORDS else 1,
            boolean=self._is_boolean,
        )
        starts = system.player.starts(self.tasks, 1, EVALUATED)
        episodes = system.player.on_device(
            self.system.untrained, starts, self.stop, greedy=config.eval.greedy, agent=agent
        )
        return [played_row(t, e, speech) for t, e in zip(self.tasks, episodes, strict=True)]

    @property
    def _is_boolean(self) -> bool:
        return self.system.config.search.engine == BOOLEAN

    def _searched(self, queries: Sequence[str] | None) -> list[RewriteRow]:
        """What queries find; None: the original ones."""
        given = [task.question for task in self.tasks] if queries is None else queries
        found = self._found(given, self.system.config.eval.depth)
        return [searched_row(*each) for each in zip(self.tasks, given, found, strict=True)]

    def _found(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...] | Failure]:
        """The documents of each query; searches that fail are done again.

        Raises:
            FeedbackLost: too many fail for good.
        """
        system, rules = self.system, self.system.config.rollout
        found: list[tuple[Document, ...] | Failure] = [Failure("connection", "", 0)] * len(queries)
        failed = [*range(len(queries))]
        for _ in range(rules.attempts):
            self.stop.check()
            again = [self.tasks[n] for n in failed], k, [queries[n] for n in failed]
            for number, each in zip(failed, system.episodes.searched(*again), strict=True):
                found[number] = each
            failed = [n for n, each in enumerate(found) if isinstance(each, Failure)]
            if not failed:
                return found
        if len(failed) > rules.max_failed_share * len(queries):
            first = found[failed[0]]
            assert isinstance(first, Failure)
            raise FeedbackLost(
                f"{len(failed)} of {len(queries)} searches failed, for example: "
                f"{first.message.rstrip('.')}; config.rollout.max_failed_share allows "
                f"{rules.max_failed_share:g}"
            )
        return found

    def _expansion(self) -> list[RewriteRow] | str:
        """Searches with the words that tell the first documents of each query from the rest."""
        library = self.system.inputs.library.library
        if not isinstance(library, Collections):
            return "the service that is searched gives ids and no texts"
        first = self._found([task.question for task in self.tasks], DOCUMENTS)
        queries = dict[int, str]()
        for name, own in library.by_name.items():
            places = [n for n, task in enumerate(self.tasks) if task.collection == name]
            config = self._words_of(own)
            words = Words(config)
            texts = {n: [each.text for each in found] for n in places if (found := _list(first[n]))}
            feedback = {n: feedback_of(texts.get(n, ()), words) for n in places}
            wanted = {word for each in feedback.values() for word in each.weights}
            self.stop.check()
            known = passages_with(own.corpus, wanted, config)
            for n, each in feedback.items():
                original = self.tasks[n].question
                terms = feedback_terms(original, each, known, len(own.corpus), words)
                queries[n] = expanded(original, terms, boolean=self._is_boolean)
        return self._searched([queries[n] for n in range(len(self.tasks))])

    def _words_of(self, library: CorpusLibrary) -> BM25Config:
        """How words are read: as the index does, or the config says if vectors are compared."""
        index = library.searched.index if library.searched is not None else None
        if isinstance(index, BM25Index | BooleanIndex):
            return index.config
        return self.system.config.search.of_index("").words


def _list(found: tuple[Document, ...] | Failure) -> Sequence[Document]:
    return () if isinstance(found, Failure) else found


def _content(query: str) -> str:
    """The words that are no function words; the query itself if there is none."""
    return " ".join(content_words(query)) or query
