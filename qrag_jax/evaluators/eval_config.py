"""Settings of evaluations: the data, the number of questions and the search for actions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from qrag_jax.errors import Count, InputError, Natural, one_of, within
from qrag_jax.policies.document_scores import LEAST_BLOCK
from qrag_jax.retrieval.paths import BEAM_SCORES
from qrag_jax.runtime.whole_files import half

UNTIL_FOUND = "return_until_found"
BEST_BY = ("return", UNTIL_FOUND)  # scores that choose the best checkpoint
# Which questions are scored: a checkpoint's score is too high on those that chose it.
CHOOSING, REPORTED, ALL = HALVES = ("choosing", "reported", "all")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Section `eval`."""

    path: str = ""  # data to evaluate on; "": the dev part of data.path
    samples: Natural = 500  # fixed questions scored during training, 0: all
    # The score whose mean chooses the best checkpoint: "return", of the full budget as in training,
    # or "return_until_found", 1 if all facts of a question are found (answer key, as in Q-RAG).
    best_by: Annotated[str, one_of(BEST_BY)] = "return"
    batch_size: Count = 32  # questions played at once
    # W, paths searched by qrag_jax.evaluate; 1 is greedy
    beam: Annotated[int, within(1, LEAST_BLOCK)] = 1
    # ranks paths: Σ log π (policy), Σ γ^t·Q (sum), last Q (last)
    beam_score: Annotated[str, one_of(BEAM_SCORES)] = "policy"
    stop_threshold: float = -math.inf  # an episode ends before an action whose Q is not above it
    seed: int = 42  # draws the scored questions; in the retrieval log's name

    @property
    def searches(self) -> bool:
        """Whether `qrag_jax.evaluate` also plays by beam search or with a stopping threshold."""
        return self.beam > 1 or self.stop_threshold > -math.inf

    def check_devices(self, devices: int) -> None:
        """Refuses batches that do not split over the devices."""
        if self.batch_size % devices:
            raise InputError(
                f"config.eval.batch_size is {self.batch_size}; use a multiple of the {devices} "
                "devices."
            )


@dataclasses.dataclass(frozen=True)
class HalvedEvalConfig:
    """Section `eval` of fixed questions, half of which choose the best checkpoint."""

    samples: Natural = 300  # fixed questions scored during training, 0: all
    seed: int = 42  # draws the scored questions
    # Which are scored: "choosing", the half that chooses the best checkpoint, or "all" questions;
    # evaluate scores the other half, "reported", unless this is "all"
    part: Annotated[str, one_of(HALVES)] = CHOOSING


class Drawn(NamedTuple):
    """Questions that are scored."""

    places: list[int]  # theirs, ascending
    choosing: int  # how many questions may choose the best checkpoint
    apart: bool  # these are others than those that are reported

    def summary(self, chose: int, *, others: bool) -> dict[str, Any]:
        """What a summary says of both sets, with a line for people.

        Args:
            chose: `eval.samples` of the training.
            others: the questions are not the run's.
        """
        count, choosing = len(self.places), min(chose or self.choosing, self.choosing)
        if others:
            return {"reported": count, "line": f"{count} questions, other ones than the run's"}
        line = f"{choosing} questions choose the best checkpoint, {count} others are scored"
        if not self.apart:
            line = f"{choosing} questions choose the best checkpoint, and {count} of all are scored"
        return {"choosing": choosing, "reported": count, "apart": self.apart, "line": line}


def drawn(ids: Sequence[str], config: Any) -> Drawn:
    """Draws the questions that are scored.

    One half of the ids, by their digests, chooses the best checkpoint, and the other is reported.
    Where one half would be empty, all questions do both.

    Args:
        config: section `eval`: `samples` (how many, 0 for all), drawn by `seed`, of the `part`, one
            of `HALVES`.
    """
    halves = [[n for n, name in enumerate(ids) if half(name) == side] for side in (0, 1)]
    apart = config.part != ALL and all(map(bool, halves))
    if not apart:
        halves = [[*range(len(ids))]] * 2
    part = halves[config.part == REPORTED]
    order = np.random.default_rng(config.seed).permutation(len(part))
    places = sorted(part[n] for n in order[: config.samples or len(part)].tolist())
    return Drawn(places, len(halves[0]), apart)


def report_on(config: Any, samples: int, *, others: bool) -> int:
    """Sets the config of a run to the questions that its scores are of; returns `eval.samples`.

    Args:
        samples: how many are scored, 0 for all.
        others: the questions are not the run's, so that none of them has chosen anything.
    """
    chose, config.eval.samples = int(config.eval.samples), samples
    if config.eval.part != ALL:
        config.eval.part = ALL if others else REPORTED
    return chose
