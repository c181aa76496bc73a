"""Updates the configs of runs that older code saved, so that these can be resumed and scored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_collections

from qrag_jax.data.config import SETTINGS
from qrag_jax.data.generators.noise import SHARED
from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import LEFT_OPEN
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import UNNORMALISED_SCALE, family_of
from qrag_jax.runtime import log_config
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import add_later_fields, check_same_config, read_fields
from qrag_jax.systems.data_section import source_section
from qrag_jax.systems.q_rag_config import complete, prune

# Fields that do not change what a run computes: a resumed run may have other values.
FREE_FIELDS = (
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.max_skipped_steps",
    "train.log_episodes",
    "train.first_eval_minutes",
    "data.cache",
    "eval.samples",
    "eval.batch_size",
    "eval.seed",
    "eval.beam",
    "eval.stop_threshold",
    # Requests to a language model may change (a longer answer, another prompt): the run logs such
    # a change, see `runtime.run.Run.restore`.
    "llm.",
    "reward.prompt",
    "reward.path",
    "reward.max_failure_share",
    "runtime.",
    "log.",
    "profile",
)

# Fields that were added later, each with the value that holds for runs saved without it.
LATER_FIELDS: dict[str, Any] = {
    "system": "q_rag",
    "profile": 0,
    "encoder.activations": "auto",
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
    "data.negatives.index": "",
    "data.negatives.search": "",
    "data.negatives.count": 10,
    "data.negatives.skip": 0,
    "env.positions": "none",
    "env.stop_action": False,
    "reward.step_cost": 0.0,
    "eval.best_by": "return",
    "eval.beam": 1,
    "eval.beam_score": "policy",
    "eval.stop_threshold": -math.inf,
    "train.max_skipped_steps": 10,
    "train.first_eval_minutes": 10.0,
    "train.log_episodes": 8,  # what is kept to look at, not what is computed
    "optimizer.matrices": "adam",
    "optimizer.muon_rate": 5.0,
    "runtime.sharding": (),
    "runtime.deterministic": True,  # how fast a step is, not what it computes
    **log_config.LATER_FIELDS,
}

# Fields of a source that were added later: how older runs of this source drew their documents.
OLDER_DRAWS: dict[str, Any] = {"noise_dev": SHARED, "redraw": False}

# Fields that an old run may have and that nothing reads any more.
REMOVED_FIELDS = ("encoder.block_rows",)


def load_config(path: Path) -> ml_collections.ConfigDict:
    """Reads the config of a run.

    A field that did not exist when the run was saved, or whose meaning has changed since, gets the
    value that keeps the run as it was. Fields that the run does not read are dropped.

    Raises:
        InputError: the file is missing, is not a JSON object, or is not the config of a run.
    """
    saved = read_fields(path)
    if missing := [name for name in ("data", "train") if not isinstance(saved.get(name), dict)]:
        raise InputError(
            f"{path} has no section {missing[0]}, so it is not the config of a run; give the "
            "folder of a training."
        )
    with refusing_types(path):
        for name in REMOVED_FIELDS:
            part, _, field = name.partition(".")
            saved.get(part, {}).pop(field, None)
        add_later_fields(saved, LATER_FIELDS)
        _put_under_sources(saved["data"])
        _fill_older_run(saved, path.parent / FOLDER)
        return prune(complete(ml_collections.ConfigDict(saved)))


def resume_config(given: ml_collections.ConfigDict, run: Run) -> None:
    """Fills the open fields of `given` from the saved config of the run, if the run has begun.

    Raises:
        InputError: the run has begun with another config.
    """
    if run.has_begun:
        saved = load_config(run.config_path)
        fill_from_saved(given, saved)
        draw_as(given, saved)
        check_same_config(saved, given, FREE_FIELDS)


def draw_as(config: ml_collections.ConfigDict, saved: ml_collections.ConfigDict) -> None:
    """Keeps the way in which an older run drew documents, where `config` has the defaults."""
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
    """A copy of the config whose open fields have the values that `encoder` uses."""
    result = config.copy_and_resolve_references()
    for name in LEFT_OPEN:
        result.encoder[name] = getattr(encoder, name)
    return result


def fill_from_saved(config: ml_collections.ConfigDict, saved: ml_collections.ConfigDict) -> None:
    """Fills the open fields of `config` with the values that were settled when the run began."""
    for name in LEFT_OPEN:
        if config.encoder[name] == LEFT_OPEN[name]:
            config.encoder[name] = saved.encoder[name]
    config.env.max_steps = config.env.max_steps or saved.env.max_steps


def _put_under_sources(data: dict[str, Any]) -> None:
    """Moves `data.babilong` to `data.sources.babilong`; a source that is a number is its weight."""
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
    """Settles the open encoder fields of an older run by the family of its model.

    Older code did not read these settings from the model's folder.

    Args:
        folder: folder of the run's encoder. Without it nothing was trained, and nothing is done.
    """
    if not (folder / "config.json").is_file():
        return
    family = family_of(read_config(folder), str(folder / "config.json"))
    own = {"pooling": family.pooling, "normalise": family.normalise, "scale": UNNORMALISED_SCALE}
    for name, value in own.items():
        if saved["encoder"][name] == LEFT_OPEN[name]:
            saved["encoder"][name] = value
