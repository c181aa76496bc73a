"""What a rewritten query is worth, and guards against hacks of this reward.

With `gain`, the default, the reward is a measure of what the query finds less the same one of the
original query, at the same k: to echo the query earns exactly 0, and what makes it worse earns less
than 0.

An output without a query that the search can read is worth what a query is that finds nothing: 0,
and less the original's measure with `gain`. So it is never worth more than any query that was
searched for. It is worth no less, either: format and length are logged apart, so that a reward
which grows is no other than what is found. `TIERS` are rewards as others have them, with their
formats.

`reading_cost` is in the reward alone: the measure and its gain are logged without it, and so is
everything that `evaluate` scores. An output without a query pays it like the echo.
"""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Document
from qrag_jax.environments.queries import REWRITTEN, UNREADABLE, Searched
from qrag_jax.errors import Count, InputError, Weight, one_of
from qrag_jax.metrics import ranking
from qrag_jax.metrics.answers import answer_place, has_answer, normalise

READ_SHARE = "read_share"

NDCG, RECALL, RR, ANSWER_RANK = MEASURES = ("ndcg", "recall", "rr", "answer_rank")
OF_GRADES = MEASURES[:3]
_LOGGED = {ANSWER_RANK: "answer_rr"}

# ---------------------------------------------------------------- tiers
# Rewards as DeepRetrieval (arXiv 2503.00223) has them: `engines` by recall and `qa` by the place of
# the first document with an answer, both trained at k 3000; `ir` by nDCG, at several k from 10 to
# 3000. A query that the search cannot read has the right format. The first two then give -4 in
# place of a tier, as DeepRetrieval does where a search raises an error (here it can only be the
# query: a search that fails ends in no reward at all).

# The reward of a query ("": none could be read), of whether the search can read it, and of the
# measure's value in [0, 1].
_Tier = Callable[[str, bool, float], float]


def _steps(*steps: tuple[float, float]) -> _Tier:
    """Of (least value, reward), the highest first, besides the format's."""

    def tier(query: str, readable: bool, value: float) -> float:
        if not query:
            return -4.0
        return 1.0 + (next((r for least, r in steps if value >= least), -3.5) if readable else -4.0)

    return tier


def _ir(query: str, readable: bool, value: float) -> float:
    if not query:
        return -2.0
    return 0.1 + value if value > 0 else 0.0


_ENGINES = ((0.7, 5.0), (0.5, 4.0), (0.4, 3.0), (0.3, 1.0), (0.1, 0.5), (0.05, 0.1))
_PLACES = ((5, 5.0), (20, 4.0), (50, 2.0), (100, 1.0), (1000, 0.5), (3000, 0.1))
TIERS: Mapping[str, tuple[str, _Tier]] = {  # with the measure of each
    "engines": (RECALL, _steps(*_ENGINES)),
    "qa": (ANSWER_RANK, _steps(*((1 / last, reward) for last, reward in _PLACES))),
    "ir": (NDCG, _ir),
}

# ---------------------------------------------------------------- the reward


@dataclasses.dataclass(frozen=True)
class RewriteRewardConfig:
    # Of what the query finds: ndcg, recall, rr (1 / place of the first relevant document) or
    # answer_rank (1 / place of the first document that has an answer in it)
    measure: Annotated[str, one_of(MEASURES)] = NDCG
    k: Count = 100  # K, the places that count in training; evaluation has its own
    gain: bool = True  # less the original query's measure, so that to echo it earns 0
    # Rewards as DeepRetrieval (engines, qa, ir) has them, with format terms and without gain; "":
    # the measure itself
    tiers: Annotated[str, one_of(("", *TIERS))] = ""
    # Taken from the reward of a query for which an index of words reads as many entries as for the
    # original, of others by what it reads: nearly all of that are words that most passages have
    reading_cost: Weight = 0.0

    def __post_init__(self) -> None:
        if not self.tiers:
            return
        measure, _ = TIERS[self.tiers]
        needed = {"reading_cost": 0.0, "gain": False, "measure": measure}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise InputError(
                    f"config.reward.tiers {self.tiers!r} were published with config.reward.{name}="
                    f"{value!r}; set it so, or leave tiers empty."
                )

    @property
    def name(self) -> str:
        """The measure's own name, such as "ndcg@100"."""
        return f"{_LOGGED.get(self.measure, self.measure)}@{self.k}"


@dataclasses.dataclass(frozen=True)
class RewriteReward:
    config: RewriteRewardConfig
    # By collection, of the index of words; a cost of reading needs them
    entries: Mapping[str, Counter[str]] = dataclasses.field(default_factory=dict)

    def check(self, task: Sample) -> None:
        if self.config.measure == ANSWER_RANK and not any(map(normalise, task.answers)):
            raise InputError(
                f"the query {task.id!r} has no answer, which config.reward.measure "
                f"{ANSWER_RANK} needs; give answers, or use {', '.join(OF_GRADES)}."
            )

    def measure(self, task: Sample, hits: Sequence[Document]) -> float:
        """The measure of documents, best first, in [0, 1]."""
        measure, k = self.config.measure, self.config.k
        if measure == ANSWER_RANK:
            place = answer_place((d.text for d in hits[:k]), task.answers)
            return 1 / place if place else 0.0
        return ranking.MEASURES[measure]([d.id for d in hits], dict(task.grades), k)

    def of(self, task: Sample, ended: Searched, original: float) -> dict[str, float]:
        """The parts of the reward of one episode.

        - `reward`: what is learned from;
        - the measure by its name, in [0, 1], and `gain`, which is it less `original`, that of what
          the original query finds in the same collection;
        - `format`: 1 if a query could be read from the output, even one that the search cannot
          read; else 0;
        - `words`: of the query;
        - `read_share`, where reading costs, see `read_share`.
        """
        searched = ended.outcome == REWRITTEN
        query = ended.answer if ended.outcome in (REWRITTEN, UNREADABLE) else ""
        value = self.measure(task, ended.found if searched else ())
        gain = value - original
        if self.config.tiers:
            reward = TIERS[self.config.tiers][1](query, searched, value)
        else:
            reward = gain if self.config.gain else value
        parts = {
            "reward": reward,
            self.config.name: value,
            "gain": gain,
            "format": float(bool(query)),
            "words": float(len(query.split())),
        }
        if self.config.reading_cost:
            share = read_share(self.entries[task.collection], query, task.question)
            parts |= {"reward": reward - self.config.reading_cost * share, READ_SHARE: share}
        return parts


def entries_of(texts: Iterable[str]) -> Counter[str]:
    return Counter(word for text in texts for word in _index_words(text))


def read_share(entries: Counter[str], query: str, original: str) -> float:
    """Entries of the index that a search for a query reads, by those that the original reads.

    A query without a word costs what the original does, so that nothing is won by writing nothing;
    so does any query where the original reads nothing.
    """
    read, all_read = (
        sum(entries[word] for word in _index_words(text)) for text in (query, original)
    )
    return read / all_read if all_read and _index_words(query) else 1.0


def _index_words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"\w+(?:['’-]\w+)*", text)}


# ---------------------------------------------------------------- guards
# A policy that is paid for what its queries find may write the answer that it remembers into the
# query, make the query ever longer, or repeat words; `guard_measures` shows that, query by query.
# Or it may collapse, which the KL and the entropy of updates show.

GUARD_MEASURES = ("answer_in_query", "repetition", "kept_words", "new_words", "query_words", "echo")
STOP, TELL = ACTIONS = ("stop", "tell")

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_POSSESSIVE = re.compile(r"(?<=\w)['’]s\b", re.IGNORECASE)
_OPERATORS = frozenset({"AND", "OR", "NOT"})
# A field behind a term, such as [tiab] or [Title/Abstract:~3].
_FIELD = re.compile(r"(?<=[\w\"')*])\[[A-Za-z][A-Za-z0-9/ :~-]{0,40}\]")


def guard_measures(original: str, query: str, answers: Sequence[str]) -> dict[str, float]:
    """Each of `GUARD_MEASURES` of one rewritten query.

    Words have no case, no punctuation and no possessive 's. Boolean operators in capitals and names
    of fields are no words, or each Boolean query would repeat itself.

    - `answer_in_query`: 1 if an answer is in the query and not in the original;
    - `repetition`: share of the query's words that stand there before, 0 without words;
    - `kept_words`: share of the original's words that are in the query, 1 if it has none;
    - `new_words`: share of the query's words that are not in the original, 0 without words;
    - `query_words`: parts of the query between blanks, of whatever kind;
    - `echo`: 1 if both have the same words and operators in the same order.
    """
    before, after = _query_words(original), _query_words(query)
    known, written = set(before), set(after)
    leaked = any(has_answer(query, [a]) and not has_answer(original, [a]) for a in answers)
    return {
        "answer_in_query": float(leaked),
        "repetition": 1 - len(written) / len(after) if after else 0.0,
        "kept_words": sum(w in written for w in before) / len(before) if before else 1.0,
        "new_words": sum(w not in known for w in after) / len(after) if after else 0.0,
        "query_words": float(len(query.split())),
        "echo": float(_in_order(query) == _in_order(original)),
    }


def _in_order(text: str) -> list[str]:
    plain = _plain(text).casefold()
    return _WORD.findall(plain) or plain.split()


def _query_words(text: str) -> list[str]:
    words = _WORD.findall(_FIELD.sub(" ", _plain(text)))
    return [w.casefold() for w in words if w not in _OPERATORS]


def _plain(text: str) -> str:
    return _POSSESSIVE.sub("", unicodedata.normalize("NFKC", text))


@dataclasses.dataclass(frozen=True)
class GuardsConfig:
    """Section `guards`: limits of an update's means, and what happens beyond them."""

    # KL to the stage's first weights, nats a token; it is measured if the algorithm's beta is
    # above 0. 0: no limit
    max_kl: Weight = 0.0
    min_entropy: Weight = 0.0  # of the policy, nats a token; 0: no limit
    max_words: Weight = 0.0  # words of a query; 0: no limit
    max_repetition: Weight = 0.0  # share of a query's words that repeat an earlier one; 0: no limit
    patience: Count = 5  # updates in a row beyond a limit until something happens
    # what happens: stop (the run ends), or tell (a line is printed)
    action: Annotated[str, one_of(ACTIONS)] = STOP

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a limit."""
        return tuple(metric for field, (metric, *_) in _LIMITS.items() if getattr(self, field))


# Field of `GuardsConfig` → its metric, what that is, and its unit.
_LIMITS = {
    "max_kl": ("kl", "the KL to the stage's first weights", " nats a token"),
    "min_entropy": ("entropy", "the policy's entropy", " nats a token"),
    "max_words": ("query_words", "the length of queries", " words"),
    "max_repetition": ("repetition", "the share of repeated words", ""),
}


def beyond_limits(config: GuardsConfig, beyond: Counter[str], metrics: Mapping[str, float]) -> str:
    """A sentence for each limit that was passed in as many updates in a row as the patience.

    `beyond` counts, by metric, updates in a row beyond its limit; it is updated. `metrics` are the
    update's means; NaN, of an update with nothing to measure, neither counts nor ends a row.
    """
    sentences, patience = [], config.patience
    for field, (metric, what, unit) in _LIMITS.items():
        if not (limit := getattr(config, field)):
            continue
        if math.isnan(value := float(metrics[metric])):
            continue
        side = "below" if field.startswith("min_") else "above"
        is_beyond = value < limit if side == "below" else value > limit
        beyond[metric] = beyond[metric] + 1 if is_beyond else 0
        if beyond[metric] >= patience:
            beyond[metric] = 0
            sentences.append(
                f"{what} ({metric}) is {value:.6g}{unit} and was {side} config.guards.{field}, "
                f"{limit:.6g}, in the last {patience} updates."
            )
    return " ".join(sentences)
