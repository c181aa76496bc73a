"""Settings of evaluations: the data, the number of questions and the search for actions."""

from __future__ import annotations

import dataclasses
import math

from qrag_jax.errors import InputError, check_known, check_least
from qrag_jax.policies.document_scores import LEAST_BLOCK
from qrag_jax.retrieval.paths import BEAM_SCORES

UNTIL_FOUND = "return_until_found"
BEST_BY = ("return", UNTIL_FOUND)  # scores that choose the best checkpoint


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Section `eval`.

    Raises:
        InputError: a field cannot be used.
    """

    path: str = ""  # data to evaluate on; "": the dev part of data.path
    samples: int = 500  # fixed questions scored during training, 0: all
    # The score whose mean chooses the best checkpoint: "return", of the full budget as in training,
    # or "return_until_found", 1 if all facts of a question are found (answer key, as in Q-RAG).
    best_by: str = "return"
    batch_size: int = 32  # questions played at once
    beam: int = 1  # W, paths searched by qrag_jax.evaluate; 1 is greedy
    beam_score: str = "policy"  # ranks paths: Σ log π (policy), Σ γ^t·Q (sum), last Q (last)
    stop_threshold: float = -math.inf  # an episode ends before an action whose Q is not above it
    seed: int = 42  # draws the scored questions; in the retrieval log's name

    def __post_init__(self) -> None:
        check_least("eval", self, batch_size=1, samples=0)
        check_known("eval", self, "best_by", BEST_BY)
        check_known("eval", self, "beam_score", BEAM_SCORES)
        if not 1 <= self.beam <= LEAST_BLOCK:
            raise InputError(
                f"config.eval.beam is {self.beam}; it must be from 1 to {LEAST_BLOCK}."
            )

    @property
    def searches(self) -> bool:
        """Whether `qrag_jax.evaluate` also plays by beam search or with a stopping threshold."""
        return self.beam > 1 or self.stop_threshold > -math.inf

    def check_devices(self, devices: int) -> None:
        """Refuses batches that do not split over the devices.

        Raises:
            InputError: `batch_size` is not a multiple of the number of devices.
        """
        if self.batch_size % devices:
            raise InputError(
                f"config.eval.batch_size is {self.batch_size}; use a multiple of the {devices} "
                "devices."
            )
