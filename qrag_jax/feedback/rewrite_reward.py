"""What a rewritten query is worth: a measure of what it finds, less that of the original query.

| measure | its name where it is told | what |
|---|---|---|
| `ndcg` | `ndcg@k` | see `metrics.ranking` |
| `recall` | `recall@k` | see `metrics.ranking` |
| `rr` | `rr@k` | reciprocal rank of the first relevant document |
| `answer_rank` | `answer_rr@k` | reciprocal rank of the first document with an answer string |

With `gain`, the default, the reward is this measure less the same one of the original query, at the
same k: to echo the query earns exactly 0, and what makes it worse earns less than 0.

An output without a query that the search can read is worth what a query is that finds nothing: 0,
and less the original's measure with `gain`. So it is never worth more than any query that was
searched for, and it costs most where the original was good. It is worth no less, either: format is
told alone, and so is length unless it costs, so that a reward which grows is no other than what is
found. Where the original finds nothing, an output without a query earns 0 as the echo does; then
only queries that find something stand out. The presets of `rewrite_tiers` are rewards as others
have them, with their formats.

A config may ask for a cost of length, or of what an index of words reads (`reading_cost`). These
are in the reward alone: the measure and its gain are told without them, and so is everything that
`evaluate` scores. An output without a query pays them like the echo, so that it stays worth no
more.

A search that failed ended in no `Searched` but in `Failed`, and has no reward.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from qrag_jax.data.generators.dropped_words import words_of
from qrag_jax.environments.episode import Document
from qrag_jax.environments.queries import RewriteTask, Searched
from qrag_jax.environments.query_output import REWRITTEN, UNREADABLE
from qrag_jax.data.words import words_of
from qrag_jax.environments.query_rewriting.output import REWRITTEN, UNREADABLE
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Document
from qrag_jax.errors import InputError, check_known, check_least
from qrag_jax.feedback.rewrite_tiers import TIERS, Judged
from qrag_jax.metrics import ranking
from qrag_jax.metrics.answer_places import answer_place
from qrag_jax.metrics.answers import normalise

NDCG, RECALL, RR, ANSWER_RANK = MEASURES = ("ndcg", "recall", "rr", "answer_rank")
_OF_GRADES = {name: ranking.MEASURES[name] for name in (NDCG, RECALL, RR)}
_TOLD = {ANSWER_RANK: "answer_rr"}
_SECTION = "reward"
READ_SHARE = "read_share"


@dataclasses.dataclass(frozen=True)
class RewriteRewardConfig:
    """Section `reward`: what a rewritten query is worth."""

    # Of what the query finds: ndcg, recall, rr (1 / place of the first relevant document) or
    # answer_rank (1 / place of the first document that has an answer in it)
    measure: str = NDCG
    k: int = 100  # K, the places that count in training; evaluation has its own
    gain: bool = True  # less the original query's measure, so that to echo it earns 0
    # Rewards as DeepRetrieval (engines, qa, ir) or its remake (remake) has them, with format terms
    # and without gain; "": the measure itself
    tiers: str = ""
    # Taken from the reward of a query as long as the original, of others by their words: a tie
    # between two queries goes to the shorter one. Most words change a ranking too little to be told
    # from chance by the judged queries alone
    length_cost: float = 0.0
    # Taken from the reward of a query for which an index of words reads as many entries as for the
    # original, of others by what it reads: words that most passages have are nearly all of that,
    # and others cost next to nothing
    reading_cost: float = 0.0

    def __post_init__(self) -> None:
        check_known(_SECTION, self, "measure", MEASURES)
        check_least(_SECTION, self, k=1, length_cost=0, reading_cost=0)
        if not self.tiers:
            return
        for name in ("length_cost", "reading_cost"):
            if cost := getattr(self, name):
                raise InputError(
                    f"config.{_SECTION}.tiers is {self.tiers!r} and config.{_SECTION}.{name} is "
                    f"{cost}, but tiers are rewards as they were published; set one of them."
                )
        if self.tiers not in TIERS:
            raise InputError(
                f"config.{_SECTION}.tiers is {self.tiers!r}; use one of {', '.join(TIERS)}, or "
                "leave it empty."
            )
        if self.gain:
            raise InputError(
                f"config.{_SECTION}.tiers is {self.tiers!r} and config.{_SECTION}.gain is True, "
                "but tiers are of the query alone; set gain to False, or leave tiers empty."
            )
        if self.measure != TIERS[self.tiers].measure:
            raise InputError(
                f"config.{_SECTION}.tiers is {self.tiers!r}, whose measure is "
                f"{TIERS[self.tiers].measure}, and config.{_SECTION}.measure is {self.measure}; "
                "set it to that."
            )

    @property
    def name(self) -> str:
        """The measure's own name, such as "ndcg@100"."""
        return f"{_TOLD.get(self.measure, self.measure)}@{self.k}"


@dataclasses.dataclass(frozen=True)
class RewriteReward:
    """Rewards episodes.

    Attributes:
        config: which reward.
        entries: by collection, of the index of words; a cost of reading needs them.
    """

    config: RewriteRewardConfig
    entries: Mapping[str, Entries] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parts."""
        own = ("reward", self.config.name, "gain", "format", "words")
        return (*own, READ_SHARE) if self.config.reading_cost else own

    def check(self, task: RewriteTask) -> None:
        """Refuses a task that cannot be rewarded."""
        measure = self.config.measure
        if measure == ANSWER_RANK:
            if not any(map(normalise, task.answers)):
                raise InputError(
                    f"the query {task.id!r} has no answer, which config.{_SECTION}.measure "
                    f"{measure} needs; give answers, or use {', '.join(_OF_GRADES)}."
                )
        elif not task.grades:
            raise InputError(
                f"the query {task.id!r} has no relevant document, which config.{_SECTION}.measure "
                f"{measure} needs; leave the query out, or use {ANSWER_RANK} if it has answers."
            )

    def measure(self, task: RewriteTask, found: Sequence[Document]) -> float:
        """The measure of documents, best first, in [0, 1]; also that of the original query's."""
        self.check(task)
        k = self.config.k
        if self.config.measure == ANSWER_RANK:
            place = answer_place((each.text for each in found[:k]), task.answers)
            return 1 / place if place else 0.0
        ranking = [each.id for each in found[:k]]
        return _OF_GRADES[self.config.measure](ranking, dict(task.grades), k)

    def of(self, task: RewriteTask, ended: Searched, original: float) -> dict[str, float]:
        """Each of `names` of one episode.

        - `reward`: what is learned from;
        - the measure by its own name, in [0, 1];
        - `gain`: the measure less `original`, whether or not it is the reward;
        - `format`: 1 if a query could be read from the output, even one that the search cannot
          read; else 0;
        - `words`: of the query;
        - `read_share`, where reading costs: entries of the index that the query reads, in those
          that the original reads.

        Args:
            task: what was asked.
            ended: how the episode ended.
            original: `measure` of what the original query finds in the same collection.

        Raises:
            ValueError: `original` is not in [0, 1].
        """
        if not (math.isfinite(original) and 0 <= original <= 1):
            raise ValueError(f"a measure is in [0, 1], not {original}")
        searched = ended.outcome == REWRITTEN
        query = ended.answer if ended.outcome in (REWRITTEN, UNREADABLE) else ""
        value = self.measure(task, ended.found if searched else ())
        gain = value - original
        if self.config.tiers:
            reward = TIERS[self.config.tiers].reward(Judged(query, searched, value))
        else:
            reward = gain if self.config.gain else value
            reward -= self.config.length_cost * _length(query, task.question)
        parts = {
            "reward": reward,
            self.config.name: value,
            "gain": gain,
            "format": float(bool(query)),
            "words": float(len(query.split())),
        }
        if self.config.reading_cost:
            share = self.entries[task.collection].share(query, task.question)
            parts |= {"reward": reward - self.config.reading_cost * share, READ_SHARE: share}
        return parts


def _length(query: str, original: str) -> float:
    """Words of a query, in those of the original; of none, 1."""
    return len(query.split()) / max(len(original.split()), 1) if query else 1.0


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of a collection's words.

    Attributes:
        passages: how many passages have each word; words are in small letters.
    """

    passages: Mapping[str, int]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Entries:
        """Counts the words of the passages' texts."""
        counts = Counter[str]()
        for text in texts:
            counts.update(_words(text))
        return cls(counts)

    def read(self, query: str) -> int:
        """Entries that a search for the query reads; each word counts once."""
        return sum(self.passages.get(word, 0) for word in _words(query))

    def share(self, query: str, original: str) -> float:
        """Entries read for a query, in those that the original query reads.

        Without a word in it a query costs what the original does, so that nothing is won by writing
        nothing; so does any query where the original reads nothing.
        """
        all_read = self.read(original)
        return self.read(query) / all_read if all_read and _words(query) else 1.0


def _words(text: str) -> set[str]:
    return {word.lower() for word in words_of(text)}
