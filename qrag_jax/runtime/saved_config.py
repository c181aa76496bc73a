"""A run's config: its sections of every system, and how its folder keeps and compares it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import ml_collections

from qrag_jax.errors import Count, InputError, Natural, Rule, Weight, some_of
from qrag_jax.runtime import whole_files

CONFIG_NAME = "config.json"
# Fields of every system that change nothing of what is computed: a resumed run may change them.
FREE_FIELDS = (
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.max_skipped_steps",
    "train.log_episodes",
    "train.first_eval_minutes",
    "eval.samples",
    "eval.seed",
    # Requests to a language model may change (a longer answer, another prompt): the run logs such
    # a change, see `runtime.run.Run.restore`.
    "llm.",
    "runtime.",
    "log.",
    "profile",
)
STEPS = "train.steps"  # the one field of a run that may grow
# Names of environment variables with keys, whose values reach no file, tracker or server.
SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS)S?", re.IGNORECASE)


def has_begun(workdir: Path) -> bool:
    """Whether a run's folder has its config; else what is there is of starts that were refused."""
    return (workdir / CONFIG_NAME).exists()


def save_config(config: ml_collections.ConfigDict, path: Path) -> None:
    """Writes the config as JSON, atomically; raises `OSError` if it cannot be written."""
    whole_files.write_json(path, config.to_dict())


def refuse_lost_config(workdir: Path) -> None:
    """Refuses a folder whose config was lost: the settings of its checkpoints are unknown."""
    kept = sorted(workdir.glob("checkpoints/*/[0-9]*"))
    if kept and not (workdir / CONFIG_NAME).exists():
        raise InputError(
            f"{workdir} holds checkpoints ({kept[0].relative_to(workdir)}) but its {CONFIG_NAME} "
            "is missing; restore it from a backup, or give another --workdir."
        )


def read_fields(path: Path) -> dict[str, Any]:
    """The fields that `save_config` wrote; lists become tuples again."""
    refuse_lost_config(path.parent)
    fix = "give the --workdir of a run that was trained, or restore the file from a backup"
    with whole_files.reading(path, fix):
        return _tuples(json.loads(path.read_text(encoding="utf-8")))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested sections, by dotted names."""
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


# ---------------------------------------------------------------------- sections


def check_split(field: str, size: int, parts: int, of: str = "devices") -> None:
    """Refuses a field's value that does not split into so many equal parts."""
    if size % parts:
        raise InputError(
            f"config.{field} is {size}, which does not split into {parts} equal parts ({of}); use "
            f"a multiple of {parts}."
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Section `train`."""

    steps: Count = 10_000  # optimizer steps
    batch_size: Count = 48  # questions per optimizer step
    accumulation: Count = 4  # micro-batches per optimizer step
    log_every: Count = 10  # steps that one line of metrics averages over
    eval_every: Count = 250  # steps between evaluations
    # the first evaluation comes after so many minutes, unless eval_every steps are done before; 0:
    # by steps alone
    first_eval_minutes: Weight = 10.0
    checkpoint_every: Count = 250  # steps between saves of the whole state
    # episodes of each evaluation that are kept, in episodes.jsonl and TensorBoard; 0: none
    log_episodes: Natural = 8
    # number of steps in a row with a non-finite loss or gradient that ends the run; 0: no limit
    max_skipped_steps: Natural = 10

    def host_batch(self, devices: int, hosts: int) -> int:
        """Number of questions per optimizer step on one host."""
        parts, of = devices * self.accumulation, "devices × config.train.accumulation"
        check_split("train.batch_size", self.batch_size, parts, of)
        return self.batch_size // hosts


TENSORBOARD, WANDB, MLFLOW, TRACKIO = "tensorboard", "wandb", "mlflow", "trackio"
KNOWN = (TENSORBOARD, WANDB, MLFLOW, TRACKIO)
_PROJECT = Rule(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch,
    "use 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
)


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Section `log`."""

    # Where metrics go besides metrics.jsonl, which is always written: tensorboard, wandb, mlflow,
    # trackio, with commas between them, or () for nowhere. All but the first need an extra of their
    # name (docs/experiments.md).
    to: Annotated[tuple[str, ...], some_of(KNOWN, empty=True)] = (TENSORBOARD,)
    # project of trackers that the run belongs to; MLflow's experiment
    project: Annotated[str, _PROJECT] = "qrag"

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of `to` that need a library of their own."""
        return tuple(name for name in self.to if name != TENSORBOARD)
