"""The rows of all logs of evaluations, and the log of each kind."""

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
    """What a retriever of chunks did on one sample: a row of a retrieval log.

    Attributes:
        id: the sample's id.
        question, answer: the sample's texts; `answer` may be empty.
        sf_idx: indices of the supporting facts in the document; empty if nobody knows them.
        pred_idx: indices of the chunks taken, in the order taken, without padding; may be empty.
        q_values: Q of each chunk taken, at the step that took it; finite. Empty when the chunks
            were not played (the chunk filter `gt`).
        sf_texts, pred_texts: the texts of the chunks in `sf_idx` and `pred_idx`.
        ret: the episode's discounted return; written as "return". None, and then not written: there
            is none, because it would be that of the supporting facts.
        text_len: length of the document, in characters.
        f1, em: Fact F1 and Fact EM of this sample. None, and then not written, without the facts.
        aliases: other right answers, or the other values that are asked for; written only if there
            are any.
        source: see `Sample`; "", and then not written, if nobody knows it.
    """

    id: str
    question: str
    answer: str
    sf_idx: list[int]
    pred_idx: list[int]
    q_values: list[float]
    sf_texts: list[str]
    pred_texts: list[str]
    ret: float | None = None
    text_len: int = 0
    f1: float | None = None
    em: float | None = None
    aliases: list[str] = dataclasses.field(default_factory=list)
    source: str = ""


RETRIEVALS = RowLog(
    "chunks",
    Row,
    "give a retrieval log, as `qrag evaluate` writes it",
    names={"ret": "return"},
    optional=("ret", "f1", "em", "aliases", "source"),
)


def log_name(seed: int, num_chunks: int | None = None) -> str:
    """File name of a log: `eval_seed{seed}.jsonl`, or `eval_seed{seed}_ns{num_chunks}.jsonl`."""
    chunks = "" if num_chunks is None else f"_ns{num_chunks}"
    return f"eval_seed{seed}{chunks}.jsonl"


def read_retrievals(path: Path, *, needs_facts: bool = True) -> list[Row]:
    """The rows of a retrieval log that somebody names, of one at least.

    Args:
        needs_facts: whether a row without supporting facts is refused.
    """
    rows = RETRIEVALS.read(path)
    if not rows:
        raise InputError(f"{path} holds no row; {RETRIEVALS.lost}.")
    for number, row in enumerate(rows, start=1):
        if needs_facts and not row.sf_idx:
            raise InputError(
                f"{path}, line {number}: field 'sf_idx' is empty, but its supporting facts are "
                "needed here; give a log of questions whose facts are known."
            )
    return rows


# ---------------------------------------------------------------------------- answers


@dataclasses.dataclass(frozen=True)
class AnswerRow:
    """What a model answered to one question.

    Attributes:
        id, question: id and question of the sample.
        answers: the gold answers.
        prediction: the answer extracted from `text`.
        text: the model's whole text.
        em, f1: scores of the prediction.
        rule: the rule that gave these scores.
        chunks: indices in the document of the chunks for the prompt, in the prompt's order; chunks
            that were cut are included.
        cut_chunks: number of chunks, from the first on, that were left out whole because they did
            not fit.
        cut_characters: number of characters left out in all.
        version: version of the model's weights, "" if unknown.
        finish_reason: as the server reported it.
        hops: number of facts that the answer needs.
        type: type of the question, "" if unknown.
    """

    id: str
    question: str
    answers: list[str]
    prediction: str
    text: str
    em: float
    f1: float
    rule: str
    chunks: list[int]
    cut_chunks: int
    cut_characters: int
    version: str
    finish_reason: str
    hops: int
    type: str


@dataclasses.dataclass(frozen=True)
class VerdictRow:
    """The judge's verdict on one prediction: whether it is right, and the judge's text."""

    id: str
    prediction: str
    right: bool
    text: str
    version: str


@dataclasses.dataclass(frozen=True)
class Miss:
    """A question without an answer, or an answer without a verdict.

    Attributes:
        cause: a short word; misses are counted by cause.
        message: one sentence.
        attempts: how often the server was asked.
        hops, type: as in `AnswerRow`.
    """

    id: str
    cause: str
    message: str
    attempts: int
    hops: int
    type: str

    @property
    def failed(self) -> bool:
        """Whether the infrastructure failed; else the model gave no answer, which scores 0."""
        return self.cause in INFRASTRUCTURE


_OF_ANSWERS = "give a file that `qrag answer` has written"
ANSWERS = RowLog("answers", AnswerRow, _OF_ANSWERS)
VERDICTS = RowLog("verdicts", VerdictRow, _OF_ANSWERS)
MISSES = RowLog("misses", Miss, _OF_ANSWERS)


# ---------------------------------------------------------------------------- agents


@dataclasses.dataclass(frozen=True)
class AgentRow:
    """How an agent answered one question.

    Attributes:
        id, question: of the data set.
        golds: right answers.
        answer: the agent's; "" if it gave up or broke.
        broken: why the episode has no answer; "": it has one.
        em, f1: of the answer; 0 if there is none. Where the episode `failed`, they tell nothing.
        recall: share of the gold passages that were found; None: the corpus lacks some.
        searches: `[hop]`, each with `query`, `names` and `status`.
        right: of several sampled episodes, how many answers are exactly right; None: there was one,
            searched greedily.
        sampled: number of these episodes that have not failed.
    """

    id: str
    question: str
    golds: tuple[str, ...]
    answer: str
    broken: str
    em: float
    f1: float
    recall: float | None
    searches: tuple[Mapping[str, Any], ...]
    right: int | None = None
    sampled: int = 0

    @property
    def failed(self) -> bool:
        """Whether the infrastructure broke the episode, so that nobody knows its answer."""
        return self.broken in INFRASTRUCTURE


@dataclasses.dataclass(frozen=True)
class RewardRow:
    """The rewards of an agent's episodes of one training question.

    Attributes:
        id, question: of the data set.
        mean: of the rewards; None if there is none.
        std: their standard deviation, that of n and not of n − 1; None if there is none.
        rewards: of each episode; None: it broke, or could not be scored.
        scored: number of episodes with a reward.
        broken: why the others have none, in their order.
        kept: whether `std` is above the threshold.
    """

    id: str
    question: str
    mean: float | None
    std: float | None
    rewards: list[float | None]
    scored: int
    broken: list[str]
    kept: bool


AGENTS = RowLog("agents", AgentRow, "give a log of an agent, as `qrag evaluate` writes it")
REWARDS = RowLog("rewards", RewardRow, "give a file of `qrag filter_data`")


# ---------------------------------------------------------------------------- query writers


@dataclasses.dataclass(frozen=True)
class Hop:
    """One hop of a question.

    Attributes:
        query: "" if there was none.
        outcome: what came of it, or the cause of a failure; "" if no model wrote it.
        pool: ids of the passages found so far, in the pool's order.
        scores: of this pool.
        read, sampled: tokens.
        found: ids and scores of the passages that a model's query found, best first.
    """

    query: str
    outcome: str
    pool: tuple[str, ...]
    scores: Mapping[str, float]
    read: int = 0
    sampled: int = 0
    found: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Searched:
    """How one question was searched for.

    Attributes:
        id, question, answers: of the data set.
        pages: keys of its gold pages.
        hops: one after the other; the same number, with the same scores, in all rows of a log.
        source: of the question; see `data.sample.Sample`.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    pages: tuple[str, ...]
    hops: tuple[Hop, ...]
    source: str = ""

    @property
    def failed(self) -> bool:
        """Whether a search or a server failed, so that nobody knows what the queries would find."""
        return any(hop.outcome in INFRASTRUCTURE for hop in self.hops)


@dataclasses.dataclass(frozen=True)
class RewriteRow:
    """One query, rewritten in one way.

    Attributes:
        id: unique within its collection.
        collection: "" where there is one without a name.
        original: the query that was given.
        query: what was searched for; "" if there is none.
        outcome: one of `queries.REWRITE_OUTCOMES`, or the cause of a failure; "" if no model
            wrote the query.
        text: what the model wrote.
        found: ids and scores of documents, best first; None: nothing was searched.
        sampled: tokens.
    """

    id: str
    collection: str
    original: str
    query: str
    outcome: str = ""
    text: str = ""
    found: tuple[tuple[str, float], ...] | None = ()
    sampled: int = 0

    @property
    def failed(self) -> bool:
        """Whether a call failed, so that nobody knows what the query would have found."""
        return self.outcome in INFRASTRUCTURE

    @property
    def ranking(self) -> tuple[str, ...]:
        """Ids of what was found, best first."""
        return tuple(name for name, _ in self.found or ())


HOPS = RowLog(
    "hops",
    Searched,
    "give a log of queries hop by hop, as `qrag predict` and `qrag evaluate` write it",
)
REWRITES = RowLog("rewrites", RewriteRow, "give a log of rewritten queries")


# ---------------------------------------------------------------------------- token policies

TOOL_EPISODES = "predictions of episodes with tools"  # `kind` in the record of such a file
# Parts of a reward and counts that every scored episode has.
OF_PARTS = ("em", "f1", "recall", "precision", "citation", "citation_precision", "format")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One episode of a language model with tools, with all of its tokens.

    Attributes:
        id, question: of the data set.
        answers: the gold answers.
        hops: of the question.
        draw: number of the episode among those of its question, from 0.
        prediction: the answer; "" if there is none.
        reward: None: the episode failed, so it has no reward.
        turns: of each turn of the model, `segment` (its number), `observed` (the text before it),
            `sampled` (what it said) and the texts of the single tokens of both,
            `observed_tokens` and `sampled_tokens`.
        trajectory: as `rollouts.trajectories.TokenTrajectory.to_json` gives it: ids, log-probs,
            the parts of the reward, and facts such as what was cited.
    """

    id: str
    question: str
    answers: list[str]
    hops: int
    draw: int
    prediction: str
    reward: float | None
    turns: list[dict]
    trajectory: dict

    @property
    def parts(self) -> Mapping[str, float]:
        """Of the reward."""
        return self.trajectory["parts"]

    def without_tokens(self) -> Prediction:
        """The episode with what its scores need alone: files of all tokens are large."""
        tally = self.trajectory["facts"]["tally"]
        scored = {name: self.trajectory[name] for name in ("status", "parts")}
        return dataclasses.replace(self, turns=[], trajectory=scored | {"facts": {"tally": tally}})


PREDICTIONS = RowLog("tokens", Prediction, "give a file of `qrag predict`")


def scored_episodes(path: Path) -> list[Prediction]:
    """The episodes of a file of predictions without their tokens."""
    return [each.without_tokens() for each in PREDICTIONS.each(path)]
