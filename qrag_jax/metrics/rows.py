"""The rows of all logs of evaluations, and the log of each kind.

A row has `failed` if the infrastructure did, so that nobody knows what the model would have done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.metrics.row_log import RowLog


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What a retriever of chunks did on one sample: a row of a retrieval log."""

    id: str
    question: str
    answer: str
    sf_idx: list[int]  # indices of the supporting facts in the document; empty if nobody knows them
    pred_idx: list[int]  # indices of the chunks taken, in the order taken; may be empty
    q_values: list[float]  # of each at its step; empty if they were not played (the filter `gt`)
    sf_texts: list[str]
    pred_texts: list[str]
    # discounted return; None: it would be that of the facts
    ret: float | None = dataclasses.field(default=None, metadata={"alias": "return"})
    text_len: int = 0
    f1: float | None = None
    em: float | None = None
    # Other right answers, or the other values that are asked for
    aliases: list[str] = dataclasses.field(default_factory=list)
    source: str = ""  # see `Sample`; "" if nobody knows it


RETRIEVALS = RowLog("chunks", Row)


def log_name(seed: int, num_chunks: int | None = None) -> str:
    return f"eval_seed{seed}{'' if num_chunks is None else f'_ns{num_chunks}'}.jsonl"


def read_retrievals(path: Path, *, needs_facts: bool = True) -> list[Row]:
    """The rows, one at least, of a retrieval log that a user names."""
    rows = RETRIEVALS.read(path)
    if not rows:
        raise InputError(f"{path} holds no row; give a log of `qrag evaluate`.")
    for number, row in enumerate(rows, start=1):
        if needs_facts and not row.sf_idx:
            raise InputError(
                f"{path}, line {number}: 'sf_idx' is empty; give a log of questions with facts."
            )
    return rows


# ---------------------------------------------------------------------------- answers


@dataclasses.dataclass(frozen=True)
class AnswerRow:
    id: str
    question: str
    answers: list[str]
    prediction: str  # the answer extracted from `text`
    text: str  # the model's whole text
    em: float
    f1: float
    rule: str
    chunks: list[int]  # indices of the chunks for the prompt, in its order, cut ones included
    cut_chunks: int  # number of chunks, from the first on, that were left out whole
    cut_characters: int
    version: str  # version of the model's weights, "" if unknown
    finish_reason: str  # as the server reported it
    hops: int  # number of facts that the answer needs
    type: str


@dataclasses.dataclass(frozen=True)
class VerdictRow:
    id: str
    prediction: str
    right: bool
    text: str  # the judge's
    version: str


@dataclasses.dataclass(frozen=True)
class Miss:
    """A question without an answer, or an answer without a verdict."""

    id: str
    cause: str  # a short word; misses are counted by cause
    message: str
    attempts: int
    hops: int
    type: str

    @property
    def failed(self) -> bool:
        return self.cause in INFRASTRUCTURE


ANSWERS = RowLog("answers", AnswerRow)
VERDICTS = RowLog("verdicts", VerdictRow)
MISSES = RowLog("misses", Miss)


# ---------------------------------------------------------------------------- agents


@dataclasses.dataclass(frozen=True)
class AgentRow:
    """How an agent answered one question."""

    id: str
    question: str
    golds: tuple[str, ...]
    answer: str  # the agent's; "" if it gave up or broke
    broken: str  # why the episode has no answer; "": it has one
    em: float  # 0 without an answer; nothing if the episode `failed`
    f1: float
    recall: float | None  # share of the gold passages that were found; None: the corpus lacks some
    searches: tuple[Mapping[str, Any], ...]  # `[hop]`, each with `query`, `names` and `status`
    right: int | None = None  # exactly right ones of the sampled episodes; None: one, greedily
    sampled: int = 0

    @property
    def failed(self) -> bool:
        return self.broken in INFRASTRUCTURE


@dataclasses.dataclass(frozen=True)
class RewardRow:
    """The rewards of an agent's episodes of one training question."""

    id: str
    question: str
    mean: float | None  # of the rewards; None if there is none
    std: float | None  # their standard deviation, that of n and not of n − 1; None if there is none
    rewards: list[float | None]  # of each episode; None: it broke, or could not be scored
    scored: int
    broken: list[str]  # why the others have none, in their order
    kept: bool  # whether `std` is above the threshold


AGENTS = RowLog("agents", AgentRow)
REWARDS = RowLog("rewards", RewardRow)  # of `qrag filter_data`


# ---------------------------------------------------------------------------- query writers


@dataclasses.dataclass(frozen=True)
class Hop:
    query: str  # "" if there was none
    outcome: str  # what came of it, or the cause of a failure; "" if no model wrote it
    pool: tuple[str, ...]  # ids of the passages found so far, in the pool's order
    scores: Mapping[str, float]  # of this pool
    read: int = 0
    sampled: int = 0
    found: tuple[tuple[str, float], ...] = ()  # passages of a model's query and scores, best first


@dataclasses.dataclass(frozen=True)
class Searched:
    """How one question was searched for."""

    id: str
    question: str
    answers: tuple[str, ...]
    pages: tuple[str, ...]  # keys of its gold pages
    hops: tuple[Hop, ...]  # as many, with the same scores, in all rows of a log
    source: str = ""
    gold: tuple[str, ...] = ()  # a passage of each gold page: found first, or the first of all
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of these and the last pool

    @property
    def failed(self) -> bool:
        return any(hop.outcome in INFRASTRUCTURE for hop in self.hops)


@dataclasses.dataclass(frozen=True)
class RewriteRow:
    """One query, rewritten in one way."""

    id: str  # unique within its collection
    collection: str  # "" where there is one without a name
    original: str
    query: str  # what was searched for; "" if there is none
    outcome: str = ""  # of `queries.REWRITE_OUTCOMES`, or why it failed; "": no model wrote it
    text: str = ""  # what the model wrote
    found: tuple[tuple[str, float], ...] | None = ()
    sampled: int = 0
    grades: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of judged documents

    @property
    def failed(self) -> bool:
        return self.outcome in INFRASTRUCTURE

    @property
    def ranking(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.found or ())


HOPS = RowLog("hops", Searched)
REWRITES = RowLog("rewrites", RewriteRow)


# ---------------------------------------------------------------------------- token policies

TOOL_EPISODES = "predictions of episodes with tools"  # `kind` in the record of such a file
# Parts of a reward and counts that every scored episode has.
OF_PARTS = ("em", "f1", "recall", "precision", "citation", "citation_precision", "format")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One episode of a language model with tools, with all of its tokens."""

    id: str
    question: str
    answers: list[str]
    hops: int
    draw: int  # number of the episode among those of its question, from 0
    prediction: str
    reward: float | None  # None: the episode failed, so it has no reward
    # Of each turn of the model, `segment` (its number), `observed` (the text before it), `sampled`
    # (what it said), and the texts of the tokens of both, `observed_tokens` and `sampled_tokens`
    turns: list[dict]
    trajectory: dict  # of `rollouts.trajectories.TokenTrajectory.to_json`

    @property
    def parts(self) -> Mapping[str, float]:
        return self.trajectory["parts"]


PREDICTIONS = RowLog("tokens", Prediction)


def scored_episodes(path: Path) -> list[Prediction]:
    """The episodes of a file, with what scores need alone: files of all tokens are large."""

    def scored(row: Prediction) -> Prediction:
        kept = {name: row.trajectory[name] for name in ("status", "parts")}
        kept["facts"] = {"tally": row.trajectory["facts"]["tally"]}
        return dataclasses.replace(row, turns=[], trajectory=kept)

    return [scored(row) for row in PREDICTIONS.each(path)]
