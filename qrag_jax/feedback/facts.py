"""Rewards from the annotated supporting facts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qrag_jax.data.loading import LoadedSamples
from qrag_jax.data.sample import OF_VALUES, LazySamples, Sample
from qrag_jax.errors import InputError, Weight
from qrag_jax.metrics.answers import answer_place, answer_places, worded

GROUND_TRUTH = "ground_truth"
ANSWER_IN_CHUNK = "answer_in_chunk"  # a weak one: see `labelled`


@dataclasses.dataclass(frozen=True)
class FactReward:
    """Section `reward`, for rewards from the supporting facts, or from where the answer stands."""

    # The reward: "ground_truth" ("gt"), from the supporting facts; "answer_in_chunk", a weak one
    # for data without them, once a chunk is taken in which the answer stands; "answer_em",
    # "answer_f1", "babilong_em" or "judge", from the language model of config.llm; or "own", from
    # the function of config.reward.path
    name: str = GROUND_TRUTH
    penalize_extra_steps: bool = True  # reward 0.5 + 0.5·n_facts / n_taken instead of 1
    per_fact_reward: float = 0.0  # added for every new supporting fact
    step_cost: Weight = 0.0  # cost of a chunk that is no supporting fact; makes STOP useful


def fact_feedback(
    config: FactReward, *, stop_action: bool = False, needed: int | None = None
) -> Callable[[Any, Any], jax.Array]:
    """Makes the reward function `(batch, trajectory) → rewards [B, T]`.

    It rewards the step that takes the last missing supporting fact, once per episode. The reward is
    1, or with `penalize_extra_steps` `0.5 + 0.5·n_facts / (n_taken + 1e-5)`; every new fact adds
    `per_fact_reward` (Q-RAG, arXiv 2511.07328, ground-truth feedback). A chunk that is no
    supporting fact costs `step_cost`. So if there is a STOP action, which is worth 0, another step
    pays only while a fact is likely to be found.

    With `stop_action` the last column of a batch is STOP. `needed` is how many of the facts are
    enough; None: all.
    """

    def rewards(batch: Any, trajectory: Any) -> jax.Array:
        support, actions, valid = batch.support, trajectory.actions, trajectory.valid
        hit = jnp.take_along_axis(support, actions, axis=1) & valid
        facts = support.sum(axis=1, keepdims=True)
        if needed is not None:
            facts = jnp.minimum(facts, needed)
        completes = hit & (jnp.cumsum(hit, axis=1) == facts)
        reward = jnp.ones(actions.shape, jnp.float32)
        if config.penalize_extra_steps:
            taken = jnp.arange(1, actions.shape[1] + 1, dtype=jnp.float32)[None]
            reward = 0.5 + 0.5 * facts.astype(jnp.float32) / (taken + 1e-5)
        costs = valid & ~hit
        if stop_action:
            costs &= actions != support.shape[1] - 1
        reward = jnp.where(completes, reward, 0.0)
        reward += config.per_fact_reward * hit.astype(jnp.float32)
        return reward - jnp.where(costs, config.step_cost, 0.0)

    return rewards


# ---------------------------------------------------------------- weak labels
# For questions whose supporting passages nobody knows: where one of the answers stands, as whole
# words. Such a chunk may name the answer by chance, and the passages that lead to it are not
# labelled at all. The reward is given once, for the first such chunk (Joshi et al., ACL 2017, and
# DPR, arXiv 2004.04906, take passages for positive in the same way). Of several values, all are
# needed.

NEEDED = 1  # chunks with the answer that complete an episode, unless it has several values

NO_ANSWER = "have no answer"
WORDLESS = "are answered by yes or no, which stand in no passage"
NOWHERE = "have no chunk in which the answer stands"


def holding(sample: Sample) -> tuple[int, ...]:
    """Indices of the chunks in which one of the sample's answers stands.

    Of values that are all needed, the first chunk of each; () if one stands in none.
    """
    if not sample.needs_all:
        return tuple(answer_places(sample.chunks, worded(sample.answers)))
    first = [answer_place(sample.chunks, [value]) - 1 for value in sample.answers]
    return tuple(sorted(set(first))) if -1 not in first else ()


def labelled(samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, int]]:
    """All samples with the chunks of `holding` as their support; how many have none, by reason."""
    result, without = [], Counter[str]()
    for sample in samples:
        places = holding(sample)
        if not places:
            wordless = WORDLESS if sample.answers else NO_ANSWER
            without[NOWHERE if worded(sample.answers) else wordless] += 1
        result.append(dataclasses.replace(sample, support=places))
    return result, dict(without)


def labelled_splits(
    train: LoadedSamples, dev: LoadedSamples
) -> tuple[LoadedSamples, list[Sample], list[int]]:
    """Labels the chunks in which answers stand.

    Gives what is trained on, all evaluation questions, and the numbers of those that have any.
    """
    reward = f"config.reward.name is {ANSWER_IN_CHUNK}"
    sources = [*train.by_source.items(), *dev.by_source.items()]
    for name, samples in sources:
        if isinstance(samples, LazySamples):
            raise InputError(f"{reward}, but {name} has known facts; use {GROUND_TRUTH}.")
    if len({name in OF_VALUES for name, _ in sources}) > 1:
        raise InputError(
            f"{reward}, which needs one chunk of most data and all values of "
            f"{', '.join(OF_VALUES)}, and config.data.sources has both; name one."
        )
    report = list(train.report)

    def marked(samples: Sequence[Sample], whose: str, without: str) -> list[Sample]:
        """All samples; those that cannot be rewarded have no supporting chunk."""
        relabelled, counts = labelled(samples)
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        if not any(sample.support for sample in relabelled):
            raise InputError(
                f"{reward}, but no {whose} question can be rewarded by it ({reasons}); give data "
                "with answers in config.data.path and config.eval.path, or another reward."
            )
        if reasons:
            report.append(f"{sum(counts.values())} {whose} questions {without}: {reasons}")
        return relabelled

    kept: dict[str, Sequence[Sample]] = {}
    for name, samples in train.by_source.items():
        relabelled = marked(samples, f"{name} training", "left out")
        kept[name] = [sample for sample in relabelled if sample.support]
    played = marked(dev.all, "evaluation", "not scored in training")
    scored = [number for number, sample in enumerate(played) if sample.support]
    return LoadedSamples(kept, report), played, scored
