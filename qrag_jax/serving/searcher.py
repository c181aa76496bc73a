"""What a server asks and what answers it: an engine in one step, or a trained retriever in several.

A server gets single questions, each with its own settings, and hands on many at a time. A searcher
puts those together that can be searched together, and refuses one without touching the others.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.text.extraction import well_formed
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch, Rules, SingleStepSearch
from qrag_jax.retrieval.protocol import Corpus, Where

# So that one question does not take the device from all others.
LARGEST_BEAM, LARGEST_COUNT = 64, 1000
USUAL_COUNT = 3  # passages, where nobody says how many
_LEAST_ASKED = 8


@dataclasses.dataclass(frozen=True)
class Ask:
    """One question to a server; what is None is as the searcher has it."""

    question: str  # its text
    count: int | None = None  # most passages
    steps: int | None = None  # most steps
    beam: int | None = None  # paths that are searched side by side
    threshold: float | None = None  # only passages of higher scores are taken
    where: Where | None = None  # only passages whose metadata agree are taken


Outcome = list[Hit] | InputError


class Searcher(abc.ABC):
    """Answers questions over one corpus; only one thread uses it.

    It searches at once for what can be searched for at once, and refuses a question by itself.

    Attributes:
        most_steps: that a question may ask for.
    """

    most_steps = 1

    def __init__(
        self, corpus: Corpus, cut: Callable[[Sequence[str]], list[int]] | None = None
    ) -> None:
        self.corpus, self._cut = corpus, cut or (lambda questions: [])

    def search(self, asks: Sequence[Ask]) -> list[Outcome]:
        """For each question its passages in the order found, or why it is refused.

        Where it raises, the search failed, and the questions are not to blame.
        """
        outcomes: dict[int, Outcome] = {}
        groups: dict[Hashable, list[int]] = collections.defaultdict(list)
        too_long = set(self._cut([well_formed(ask.question) for ask in asks]))
        for place, ask in enumerate(asks):
            try:
                self._check(ask)
                if place in too_long:
                    raise InputError("the question is longer than the encoder reads; shorten it.")
                key = json.dumps(ask.where, sort_keys=True) if ask.where else ""
                groups[key, self._key(ask)].append(place)
            except InputError as error:
                outcomes[place] = error
        for places in groups.values():
            group = [asks[place] for place in places]
            found: Sequence[Outcome]
            try:
                if group[0].where:
                    self.corpus.matching(group[0].where)
            except InputError as error:  # what the engine itself refuses is a fault of the server
                found = [error] * len(group)
            else:
                found = self._found(group)
            outcomes |= zip(places, found, strict=True)
        return [outcomes[place] for place in range(len(asks))]

    def _check(self, ask: Ask) -> None:
        """Refuses a question that cannot be answered, with an `InputError`."""
        if not ask.question.strip():
            raise InputError("the question is empty; ask something.")
        if well_formed(ask.question) != ask.question:
            raise InputError("the question holds half of a surrogate pair; send whole characters.")
        check_count(ask.count, self.corpus)
        for name, value, most in (
            ("steps", ask.steps, self.most_steps),
            ("beam", ask.beam, LARGEST_BEAM if self.most_steps > 1 else 1),
        ):
            if value is not None and not 1 <= value <= most:
                raise InputError(f"{name} is {value}; this server takes 1 to {most}.")

    @abc.abstractmethod
    def _key(self, ask: Ask) -> Hashable:
        """Equal for questions that can be searched for at once, if their filters are."""

    @abc.abstractmethod
    def _found(self, asks: Sequence[Ask]) -> Sequence[list[Hit]]:
        """The passages of questions of one key and one filter."""


class SingleStep(Searcher):
    def __init__(self, search: SingleStepSearch) -> None:
        super().__init__(search.index.corpus, search.encoder.cut if search.encoder else None)
        self._search = search

    def _check(self, ask: Ask) -> None:
        super()._check(ask)
        self._search.check(ask.question)

    def _key(self, ask: Ask) -> int:
        """Passages that the engine is asked for: engines compile a program for each number."""
        wanted = max(ask.count or USUAL_COUNT, _LEAST_ASKED)
        return min(1 << (wanted - 1).bit_length(), len(self.corpus))

    def _found(self, asks: Sequence[Ask]) -> list[list[Hit]]:
        texts = [ask.question for ask in asks]
        found = self._search.search(texts, self._key(asks[0]), asks[0].where)
        return [
            [hit for hit in hits if ask.threshold is None or hit.score > ask.threshold][
                : ask.count or USUAL_COUNT
            ]
            for ask, hits in zip(asks, found, strict=True)
        ]


class MultiStep(Searcher):
    """A trained retriever; a question's own beam and threshold go before its."""

    def __init__(self, search: MultiStepSearch) -> None:
        super().__init__(search.index.corpus, search.towers.cut)
        self.most_steps = search.rules.max_steps
        self._search = search

    def _found(self, asks: Sequence[Ask]) -> list[list[Hit]]:
        rules = self._key(asks[0])
        steps = [rules.steps_for(x.count) if x.steps is None else x.steps for x in asks]
        questions = [ask.question for ask in asks]
        found = self._search.with_rules(rules).search(questions, steps, asks[0].where)
        return [hits[: ask.count] for ask, hits in zip(asks, found, strict=True)]

    def _key(self, ask: Ask) -> Rules:
        topk = ask.count if ask.steps is None else None
        return self._search.rules.changed(topk=topk, beam=ask.beam, threshold=ask.threshold)


def check_count(count: int | None, corpus: Corpus) -> None:
    """Refuses more passages than there are or than are given at once, with an `InputError`."""
    most = min(len(corpus), LARGEST_COUNT)
    if count is not None and not 1 <= count <= most:
        has = f", and the corpus has {len(corpus)} passages" if most < LARGEST_COUNT else ""
        raise InputError(f"topk is {count}{has}; give 1 to {most}.")


def as_json(hit: Hit) -> Mapping[str, Any]:
    return {**hit._asdict(), "metadata": dict(hit.metadata)}
