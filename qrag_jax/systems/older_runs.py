"""Configs of runs that older code saved, as today's code has them, so that they can be gone on with
and scored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_collections

from qrag_jax.data.config import SETTINGS
from qrag_jax.data.generators.noise import SHARED
from qrag_jax.models.encoder_config import LEFT_OPEN
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import UNNORMALISED_SCALE, family_of
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import check_same_config, read_fields
from qrag_jax.systems.data_section import source_section
from qrag_jax.systems.q_rag_config import complete, prune

# Fields that change nothing in what a run computes: a resumed run may be given other values.
FREE_FIELDS = (
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.max_skipped_steps",
    "data.cache",
    "eval.samples",
    "eval.batch_size",
    "eval.seed",
    "eval.beam",
    "eval.stop_threshold",
    # What a language model is asked and how may change (a longer answer, another prompt): the run
    # says so, see `feedback.service`.
    "llm.",
    "reward.prompt",
    "reward.max_failure_share",
    "runtime.",
    "profile",
)

# Fields that came later, with the value that a run saved without them was made with.
LATER_FIELDS: dict[str, Any] = {
    "system": "q_rag",
    "profile": 0,
    "encoder.remat": "none",
    "encoder.block_tokens": 0,
    "encoder.block_sizes": 2,
    "encoder.lora.rank": 0,
    "encoder.lora.alpha": 16.0,
    "encoder.lora.dropout": 0.0,
    "encoder.lora.targets": "all-linear",
    "encoder.lora.path": "",
    "encoder.dropout": 0.0,
    "encoder.attention_dropout": None,
    "encoder.pooling": "",
    "encoder.normalise": None,
    "encoder.state_prefix": "",
    "encoder.chunk_prefix": "",
    "data.mixture": "weights",
    "env.positions": "none",
    "env.stop_action": False,
    "reward.step_cost": 0.0,
    "eval.best_by": "return",
    "eval.beam": 1,
    "eval.beam_score": "policy",
    "eval.stop_threshold": -math.inf,
    "train.max_skipped_steps": 10,
    "runtime.sharding": (),
}

# How documents were drawn before there were these fields: by runs that have the source.
OLDER_DRAWS: dict[str, Any] = {"noise_dev": SHARED, "redraw": False}

# Fields that an old run may have and that nothing reads any more.
REMOVED_FIELDS = ("encoder.block_rows",)


def load_config(path: Path) -> ml_collections.ConfigDict:
    """Reads the config of a run.

    Fields that there were not yet when it was saved, or whose meaning has changed since, get the
    value that keeps the run as it was; fields that nothing in the run read are dropped.

    Raises:
        InputError: the file is missing or no JSON object.
    """
    saved = read_fields(path)
    for name in REMOVED_FIELDS:
        part, _, field = name.partition(".")
        saved.get(part, {}).pop(field, None)
    for name, value in LATER_FIELDS.items():
        *sections, field = name.split(".")
        section = saved
        for part in sections:
            section = section.setdefault(part, {})
        section.setdefault(field, value)
    _put_under_sources(saved["data"])
    _fill_older_run(saved, path.parent / FOLDER)
    return prune(complete(ml_collections.ConfigDict(saved)))


def resume_config(given: ml_collections.ConfigDict, run: Run) -> None:
    """Fills what `given` leaves open as the run has it, if it has begun.

    Raises:
        InputError: the run has another config.
    """
    if run.has_begun:
        saved = load_config(run.config_path)
        fill_from_saved(given, saved)
        draw_as(given, saved)
        check_same_config(saved, given, FREE_FIELDS)


def draw_as(config: ml_collections.ConfigDict, saved: ml_collections.ConfigDict) -> None:
    """Lets an older run's documents be drawn as they were where `config` says nothing else."""
    for source in SETTINGS.keys() & set(saved.data.sources) & set(config.data.sources):
        ours, theirs, new = (
            config.data.sources[source],
            saved.data.sources[source],
            SETTINGS[source],
        )
        for name, old in OLDER_DRAWS.items():
            if theirs[name] == old and ours[name] == getattr(new(), name):
                ours[name] = old


def settled(config: ml_collections.ConfigDict, encoder: TextEncoder) -> ml_collections.ConfigDict:
    """A copy of the config that says what `encoder` does where `config` leaves it open."""
    result = config.copy_and_resolve_references()
    for name in LEFT_OPEN:
        result.encoder[name] = getattr(encoder, name)
    return result


def fill_from_saved(config: ml_collections.ConfigDict, saved: ml_collections.ConfigDict) -> None:
    """Fills what `config` leaves open with what was settled when the run began."""
    for name in LEFT_OPEN:
        if config.encoder[name] == LEFT_OPEN[name]:
            config.encoder[name] = saved.encoder[name]


def _put_under_sources(data: dict[str, Any]) -> None:
    """`data.babilong` becomes `data.sources.babilong`, and a source's number its weight."""
    for name, given in data["sources"].items():
        if isinstance(given, dict):
            continue
        own = {}
        if name in SETTINGS:
            own = OLDER_DRAWS | data.get(name, OLDER_DRAWS)
        data["sources"][name] = source_section(name, given).to_dict() | own
    for name in SETTINGS:
        data.pop(name, None)


def _fill_older_run(saved: dict[str, Any], folder: Path) -> None:
    """Settles the config of a run that began before folders were asked, by its family.

    Args:
        folder: the run's encoder; where there is none, nothing was trained and nothing is done.
    """
    if not (folder / "config.json").is_file():
        return
    family = family_of(read_config(folder), str(folder / "config.json"))
    own = {"pooling": family.pooling, "normalise": family.normalise, "scale": UNNORMALISED_SCALE}
    for name, value in own.items():
        if saved["encoder"][name] == LEFT_OPEN[name]:
            saved["encoder"][name] = value
