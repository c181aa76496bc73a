"""The record of a retrieval log: all settings that can change one of its rows.

The record holds digests of the weights, the questions and the tokenizer, and the run's config
without the fields that change no row. So a new field of the config is in the record without being
listed here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime.embedding_files import encoder_key

# Fields that change no row. A name that ends with a dot is a whole section; * is any name.
FREE_FIELDS = (
    # Where and how fast the rows are computed.
    "profile",
    "runtime.",
    "data.cache",
    "data.workers",
    "eval.batch_size",
    # Read only by training: the record holds the trained weights instead.
    "seed",
    "train.",
    "eval.samples",
    "eval.best_by",
    "data.limit",
    "data.mixture",
    "data.sources.*.weight",
    # Requests to a language model and its rewards: evaluation asks no model.
    "llm.",
    "reward.prompt",
    "reward.scale",
    "reward.staleness",
    "reward.max_failure_share",
)
# Settings of the beam search: greedy play to the end does not depend on them.
BEAM_FIELDS = ("eval.beam", "eval.beam_score", "eval.stop_threshold")

PREFIX = "config."


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as a record holds them: infinities become texts, because JSON has none."""
    return {
        PREFIX + name: str(v) if v in (math.inf, -math.inf) else v for name, v in fields.items()
    }


@dataclasses.dataclass(frozen=True)
class Retriever:
    """The retriever whose play a log holds."""

    label: str  # the checkpoint's label, such as "best-160" or "untrained"
    weights: str  # digest of all its parameters

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
    """What a log depends on, for `row_log.begin`.

    Fields have the names that they have on the command line.

    Args:
        fields: the fields of the run's config by names with dots, with all open fields settled.
        samples: fingerprint of the questions.
        searched: True for beam search or a rule for stopping, False for greedy play to the end.
    """
    encoder = loaded.encoder
    free = FREE_FIELDS if searched else (*FREE_FIELDS, *BEAM_FIELDS)
    return {
        "encoder": retriever.label,
        "weights": retriever.weights,
        "samples": samples,
        "tokenizer": loaded.tokenizer.fingerprint(),
        # What config.encoder.dtype "auto" means on this machine.
        "precision": list(map(str, encoder.module.precision)),
        **_written({name: value for name, value in fields.items() if not is_free(name, free)}),
    }


def is_free(name: str, free: tuple[str, ...] = FREE_FIELDS) -> bool:
    """Whether `name`, a field with its sections, is one of `free` or below one of its sections."""
    return any(fnmatchcase(name, f"{each}*" if each.endswith(".") else each) for each in free)
