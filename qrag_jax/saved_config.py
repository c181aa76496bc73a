"""The config that a run was made with, as its workdir keeps it: written, read again, compared."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections

from qrag_jax.data.generators.haystacks import NiahConfig
from qrag_jax.data.generators.noise import SHARED
from qrag_jax.data.sources import babilong, niah
from qrag_jax.data.sources.babilong import BabilongConfig
from qrag_jax.encoder_settings import fill_older_run
from qrag_jax.errors import InputError
from qrag_jax.runtime import whole_files

CONFIG_NAME = "config.json"
ENCODER = "encoder"  # folder of the model that a run starts from

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
    # says so, see `rewards`.
    "llm.",
    "reward.prompt",
    "reward.max_failure_share",
    "runtime.",
    "profile",
)

# Fields that came later, with the value that a run saved without them was made with.
LATER_FIELDS: dict[str, Any] = {
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
    "reward.scale": 1.0,
    "reward.prompt": "auto",
    "reward.completion_threshold": None,
    "reward.staleness": 1,
    "reward.max_failure_share": 0.5,
    "eval.best_by": "return",
    "eval.beam": 1,
    "eval.beam_score": "policy",
    "eval.stop_threshold": -math.inf,
    "train.max_skipped_steps": 10,
    "runtime.sharding": (),
    # Sources that such a run does not have.
    **{
        f"data.{source}.{field.name}": field.default
        for source, fields in (
            (babilong.NAME, dataclasses.fields(BabilongConfig)),
            (niah.NAME, dataclasses.fields(NiahConfig)),
        )
        for field in fields
        if field.name != "stories"  # they are read from data.path
    },
}

# How documents were drawn before there were these fields: by runs that have the source.
OLDER_DRAWS: dict[str, Any] = {"noise_dev": SHARED, "redraw": False}
DRAWN = {babilong.NAME: BabilongConfig(), niah.NAME: NiahConfig()}

# Fields that an old run may have and that nothing reads any more.
REMOVED_FIELDS = ("encoder.block_rows",)


def save_config(config: ml_collections.ConfigDict, path: Path) -> None:
    """Writes the config as JSON, whole or not at all; raises `OSError`."""
    whole_files.write_whole(path, json.dumps(config.to_dict(), indent=2) + "\n")


def refuse_lost_config(workdir: Path) -> None:
    """Refuses a folder whose config was lost: nothing tells what its checkpoints were made with.

    Raises:
        InputError: there are checkpoints but no config.
    """
    kept = sorted(workdir.glob("checkpoints/*/[0-9]*"))
    if kept and not (workdir / CONFIG_NAME).exists():
        raise InputError(
            f"{workdir} holds checkpoints ({kept[0].relative_to(workdir)}) but its {CONFIG_NAME} "
            "is missing; restore it from a backup, or give another --workdir."
        )


def load_config(path: Path) -> ml_collections.ConfigDict:
    """Reads a config that `save_config` wrote; lists become tuples again.

    Fields that there were not yet when it was saved, or whose meaning has changed since, get the
    value that keeps the run as it was.

    Raises:
        InputError: the file is missing or no JSON object.
    """
    try:
        saved = _tuples(json.loads(path.read_bytes()))
    except FileNotFoundError:
        refuse_lost_config(path.parent)
        raise InputError(
            f"{path} does not exist; --workdir must be the folder of a run that was trained."
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not JSON ({error}); restore it from a backup, or give another --workdir."
        ) from None
    if not isinstance(saved, dict):
        raise InputError(
            f"{path} is not a JSON object; restore it from a backup, or give another --workdir."
        )
    for name in REMOVED_FIELDS:
        part, _, field = name.partition(".")
        saved.get(part, {}).pop(field, None)
    for source in DRAWN:
        if source in saved.get("data", {}):
            saved["data"][source] = OLDER_DRAWS | saved["data"][source]
    for name, value in LATER_FIELDS.items():
        *sections, field = name.split(".")
        section = saved
        for part in sections:
            section = section.setdefault(part, {})
        section.setdefault(field, value)
    fill_older_run(saved, path.parent / ENCODER)
    return ml_collections.ConfigDict(saved)


def draw_as(config: ml_collections.ConfigDict, saved: ml_collections.ConfigDict) -> None:
    """Lets an older run's documents be drawn as they were where `config` says nothing else."""
    for source, new in DRAWN.items():
        for name, old in OLDER_DRAWS.items():
            if saved.data[source][name] == old and config.data[source][name] == getattr(new, name):
                config.data[source][name] = old


def check_same_config(saved: ml_collections.ConfigDict, given: ml_collections.ConfigDict) -> None:
    """Refuses to resume a run under another config.

    Raises:
        InputError: a field that the numbers depend on differs; all such fields are named.
    """
    old, new = flat(saved.to_dict()), flat(given.to_dict())
    different = [
        f"config.{name}: the run has {old.get(name)!r}, given is {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not name.startswith(FREE_FIELDS)
    ]
    if different:
        raise InputError(
            f"the workdir holds a run of another configuration ({'; '.join(different)}); give "
            "the run's own values, or another --workdir."
        )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested sections, by names with dots."""
    result: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
