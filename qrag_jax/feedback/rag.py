"""Rewards of an agent's finished episode: of its answer, and of what each search found.

A mixture names the rewards and their weights, as in "f1=1,recall=0.5". Each is in [0, 1]. Those of
the whole episode belong to its last search, the others to one search each:

| name | of | what |
|---|---|---|
| `f1`, `em` | episode | the data set's own answer metric (`metrics.answers`) |
| `sub_em` | episode | 1 if a gold answer stands in the answer |
| `rouge_l` | episode | ROUGE-L (`metrics.answers`) |
| `llm` | episode | a language model's verdict on the answer, 1 or 0 |
| `recall`, `ndcg` | episode | gold passages that were found (`metrics.ranking`) |
| `hop_recall`, `hop_ndcg` | hop | gold passages that this search was the first to find |
| `novelty` | hop | passages that no earlier search found |
| `relevance` | hop | mean score of the passages by a reranking model |

The values of `llm` and `relevance` come from models. An episode that broke, or one whose verdict is
missing, has no reward: that is a `Failure`, never 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence

from qrag_jax.data.sample import Passage, Sample
from qrag_jax.data.sources import answer_rule
from qrag_jax.environments.episode import Ended, Failed, line_of
from qrag_jax.errors import InputError
from qrag_jax.feedback.llm import judge_request
from qrag_jax.llm.outcomes import ChatRequest, Failure, Outcome, RerankRequest
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Prompt
from qrag_jax.metrics import answers, ranking

LLM, RELEVANCE = "llm", "relevance"


def em_f1(answer: str, gold: Sample) -> answers.Scores:
    """The data set's own scores of an answer."""
    return answers.score(answer_rule(gold.source), gold.id, gold.question, answer, gold.answers)


def whole_answers(gold: Sample) -> tuple[str, ...]:
    return answers.whole_answers(answer_rule(gold.source), gold.answers)


OF_EPISODE: dict[str, Callable[[str, Sample, ranking.Found], float]] = {
    "f1": lambda answer, gold, _: em_f1(answer, gold).f1,
    "em": lambda answer, gold, _: em_f1(answer, gold).em,
    "sub_em": lambda answer, gold, _: (
        em_f1(answer, gold).em
        if answer_rule(gold.source) == "ruler"
        else answers.sub_em(answer, gold.answers)
    ),
    "rouge_l": lambda answer, gold, _: answers.rouge_l(answer, whole_answers(gold)),
    "recall": lambda _, gold, hops: ranking.episode_recall(gold.relevant, hops),
    "ndcg": lambda _, gold, hops: ranking.episode_ndcg(gold.relevant, hops),
}
OF_HOPS: dict[str, Callable[[Sample, ranking.Found], tuple[float, ...]]] = {
    "hop_recall": lambda gold, hops: ranking.hop_recall(gold.relevant, hops),
    "hop_ndcg": lambda gold, hops: ranking.hop_ndcg(gold.relevant, hops),
    "novelty": lambda gold, hops: ranking.novelty(hops),
}
NAMES = (*OF_EPISODE, LLM, *OF_HOPS, RELEVANCE)
_OF_GOLD_PASSAGES = ("recall", "ndcg", "hop_recall", "hop_ndcg")


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    episode: dict[str, float]  # name → reward of the whole episode
    hops: dict[str, tuple[float, ...]]  # name → `[hop]` rewards


@dataclasses.dataclass(frozen=True)
class Mixture:
    weights: Mapping[str, float]  # name → weight, finite and not 0

    def __post_init__(self) -> None:
        unknown = ", ".join(map(repr, sorted(self.weights.keys() - {*NAMES})))
        if unknown or not self.weights:
            raise InputError(
                f"config.reward.mixture has {unknown or 'no reward'}; use {', '.join(NAMES)}."
            )
        for name, weight in self.weights.items():
            if not math.isfinite(weight) or weight == 0:
                raise InputError(f"config.reward.mixture gives {name} {weight}; change it.")
        if "rouge_l" in self.weights:
            answers.rouge_scorer()

    @classmethod
    def of(cls, text: str) -> Mixture:
        """Reads "f1=1,recall=0.5"; a name alone has the weight 1."""
        weights: dict[str, float] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, number = (word.strip() for word in part.partition("="))
            try:
                weight = float(number) if equals else 1.0
            except ValueError:
                raise InputError(f"config.reward.mixture has {part!r}; write NAME=NUMBER") from None
            if name in weights:
                raise InputError(f"config.reward.mixture has {name} twice; add its weights up.")
            weights[name] = weight
        return cls(weights)

    def check(self, gold: Sample) -> None:
        if not gold.answers:
            raise InputError(f"question {gold.id} has no right answer; give data with answers.")
        em_f1("", gold)
        needs = [name for name in self.weights if name in _OF_GOLD_PASSAGES]
        if needs and not gold.relevant:
            raise InputError(f"question {gold.id} has no gold passages; leave out {needs[0]}.")

    def score(
        self,
        gold: Sample,
        ended: Ended,
        hops: ranking.Found,
        llm: float | Failure | None = None,
        relevance: Sequence[float | Failure] = (),
    ) -> Scored | Failure:
        """The rewards of one episode, or why it has none.

        `found[hop][place]` are names of the passages of each search, in the order read. The verdict
        `llm` is not needed for an answer without a word, which is wrong. `relevance` is `[hop]`.
        """
        if isinstance(ended, Failed):
            return Failure(ended.cause, ended.message)
        episode, of_hops = {}, {}
        for name in self.weights:
            if name in OF_EPISODE:
                episode[name] = OF_EPISODE[name](ended.answer, gold, hops)
            elif name in OF_HOPS:
                of_hops[name] = OF_HOPS[name](gold, hops)
            elif name == LLM:
                verdict = llm if answers.normalise(ended.answer) else 0.0
                if isinstance(verdict, Failure):
                    return verdict
                assert verdict is not None
                episode[name] = verdict
            else:
                if failed := [r for r in relevance if isinstance(r, Failure)]:
                    return failed[0]
                of_hops[name] = tuple(r for r in relevance if not isinstance(r, Failure))
        return Scored(episode, of_hops)

    def total(self, scored: Scored) -> float:
        """The weighted sum of all rewards of an episode."""
        sums = scored.episode | {name: math.fsum(hops) for name, hops in scored.hops.items()}
        return math.fsum(self.weights[name] * reward for name, reward in sums.items())


# ---------------------------------------------------------------- rewards that models give


def judged_answer(
    prompt: Prompt, gold: Sample, answer: str, generation: Generation
) -> ChatRequest | None:
    """Asks a judge about an answer; None for an answer without a word, which is wrong."""
    if not answers.normalise(answer):
        return None
    return judge_request(prompt, gold.question, whole_answers(gold), answer, generation)


def reranked_passages(sub_query: str, passages: Sequence[Passage]) -> RerankRequest | None:
    """Asks a reranking model about the passages of a search; None if there are none."""
    texts = tuple(map(line_of, passages))
    return RerankRequest(sub_query, texts) if texts else None


def mean_score(outcome: Outcome | None) -> float | Failure:
    """The mean score of the passages; 0 if there are none.

    Models score in [0, 1]; another score is kept in that range.
    """
    if outcome is None:
        return 0.0
    if isinstance(outcome, Failure):
        return outcome
    scores = [min(max(float(score), 0.0), 1.0) for score in json.loads(outcome.text)]
    return sum(scores) / len(scores)
