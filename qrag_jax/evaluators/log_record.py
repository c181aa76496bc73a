"""What a retrieval log was made with: all that can change one of its rows.

It is the run's whole config without the fields that change no row, so that a field that comes later
is in it without being listed, and digests of the weights, the questions and the tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from qrag_jax.metrics import retrieval_log
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime.embedding_files import encoder_key

# Fields that change no row; a name with a dot at its end is a whole section.
FREE_FIELDS = (
    # Where and how fast it is computed.
    "profile",
    "runtime.",
    "data.cache",
    "data.workers",
    "eval.batch_size",
    # What training alone reads: the weights that came of it are in the record.
    "seed",
    "train.",
    "eval.samples",
    "eval.best_by",
    # What a language model is asked, and what becomes of its rewards: evaluation asks none.
    "llm.",
    "reward.prompt",
    "reward.scale",
    "reward.staleness",
    "reward.max_failure_share",
)
# Fields that say how the beam is searched: greedy play to the end does not depend on them.
BEAM_FIELDS = ("eval.beam", "eval.beam_score", "eval.stop_threshold")

PREFIX = "config."


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as a record has them: JSON knows no infinities, so these are written as texts."""
    return {
        PREFIX + name: str(v) if v in (math.inf, -math.inf) else v for name, v in fields.items()
    }


# Fields that came after this form of record, with what a record without them was made with.
LATER = _written({})


@dataclasses.dataclass(frozen=True)
class Retriever:
    """Whose play a log holds.

    Attributes:
        label: of the checkpoint, "best-160" or "untrained".
        weights: digest of all its parameters.
    """

    label: str
    weights: str

    @classmethod
    def of(cls, label: str, params: Params | Adapted) -> Retriever:
        """The retriever with these parameters."""
        return cls(label, encoder_key(params, {})[:16])


def log_record(
    fields: Mapping[str, Any],
    loaded: LoadedEncoder,
    retriever: Retriever,
    samples: str,
    *,
    searched: bool,
) -> dict[str, Any]:
    """What a log depends on, for `retrieval_log.check_meta`; fields are named as on the command
    line.

    Args:
        fields: of the run's config, by names with dots, nothing left open.
        samples: fingerprint of the questions.
        searched: by a beam, or with a rule for stopping; else play is greedy, to the end.
    """
    encoder = loaded.encoder
    free = FREE_FIELDS if searched else (*FREE_FIELDS, *BEAM_FIELDS)
    return {
        retrieval_log.RECORD: 3,
        "encoder": retriever.label,
        "weights": retriever.weights,
        "samples": samples,
        "tokenizer": loaded.tokenizer.fingerprint(),
        # What config.encoder.dtype "auto" came to on this machine.
        "precision": list(map(str, encoder.module.precision)),
        **_written({name: value for name, value in fields.items() if not is_free(name, free)}),
    }


def is_free(name: str, free: tuple[str, ...] = FREE_FIELDS) -> bool:
    """Whether `name`, a field with its sections, is one of `free` or below one of its sections."""
    return any(name == each or (each.endswith(".") and name.startswith(each)) for each in free)
