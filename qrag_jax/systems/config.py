"""The layout of every system's config: one dataclass, whose fields are its fields and sections.

Every section is always there. What the values of a config do not read is ignored, and shown as "not
read" by `train --help`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.errors import InputError, Natural, one_of
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.llm.config import leave_room
from qrag_jax.runtime import config_fields
from qrag_jax.runtime.config_fields import check_value, refusing_types, section
from qrag_jax.runtime.mesh import RuntimeConfig, make_mesh
from qrag_jax.runtime.platform import ask_determinism, enable_persistent_cache
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.whole_files import half

# Of an export: its card, the template of that, and adapters.
CARD, TEMPLATES, ADAPTER = "README.md", Path(__file__).parent / "cards", "adapter"
# Which questions are scored: a checkpoint's score is too high on those that chose it.
CHOOSING, REPORTED, ALL = HALVES = ("choosing", "reported", "all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
    NAME: ClassVar[str]
    # Further fields (besides `config_fields.FREE_FIELDS`) that do not change what a run computes: a
    # resumed run may have other values.
    FREE_FIELDS: ClassVar[tuple[str, ...]] = ()
    PATHS: ClassVar[tuple[str, ...]] = ()  # of data whose digests are kept
    # Commands besides `evaluate`, those that take its experiments, flags that few systems read
    COMMANDS: ClassVar[tuple[str, ...]] = ()
    UNTRAINED: ClassVar[tuple[str, ...]] = ()
    FLAGS: ClassVar[tuple[str, ...]] = ()
    EVALUATED_BY_MODEL: ClassVar[bool] = True  # evaluations ask the language model of section llm
    seed: int = 42  # of the shuffle, the policy's draws and random weights
    # steps traced into workdir/profile after the first two of a start, 0: none
    profile: Natural = 0
    optimizer: OptimizerConfig
    train: config_fields.TrainConfig
    runtime: RuntimeConfig
    log: config_fields.LogConfig
    llm: Any

    @classmethod
    def default(cls, *sources: str) -> ConfigDict:
        config = section(cls, system=cls.NAME)
        if "data" in config:
            from qrag_jax.data.loading import sources_section  # others read no such data

            config.data.sources = sources_section(sources)
        return config

    @classmethod
    @refusing_types("the config")
    def of(cls, config: Mapping[str, Any] | ConfigDict, **how: Any) -> Self:
        """Reads and checks the settings of a config; `how` is of `settled`."""
        fields = {name: value for name, value in config.items() if name != "system"}
        return check_value(cls, fields, "config").settled(**how)

    def settled(self) -> Self:
        """The settings with what follows from several of them; refuses those that do not fit."""
        return self

    @classmethod
    def before_devices(cls, raw: ConfigDict, *, dry: bool = False, described: bool = False) -> None:
        """See `systems.before_devices`: how much of a GPU's memory JAX takes, and determinism."""
        config = cls.of(raw)
        if config.llm is not None and not dry:
            leave_room(config.llm)
        if config.runtime.deterministic:
            ask_determinism(described=described)

    def mesh(self, mesh_of: Callable[[tuple[int, int, int]], Mesh] = make_mesh) -> Mesh:
        """The mesh of a command that plays a trained run; compiled programs are kept."""
        if self.runtime.deterministic:
            ask_determinism()
        enable_persistent_cache()
        return mesh_of(self.runtime.mesh)

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        """Sections and fields that a run with these values, by names with dots, does not read."""
        return []

    @classmethod
    def fill_open(cls, config: ConfigDict, saved: ConfigDict) -> None:
        """Fills open fields of `config` with the values that were settled when the run began."""

    @classmethod
    def resume(cls, raw: ConfigDict, run: Run) -> None:
        """Refuses to go on with a run under another config than its own."""
        if run.has_begun:
            saved = load_config(run.config_path)
            cls.fill_open(raw, saved)
            run.check_config(saved, raw, cls.FREE_FIELDS, cls.PATHS)


def refuse(config: Any, *rules: tuple[Any, str, str]) -> None:
    """Refuses a config by the first broken rule: (broken, field, why and what to do)."""
    for broken, field, why in rules:
        if broken:
            value = functools.reduce(getattr, field.split("."), config)
            raise InputError(f"config.{field} is {value!r}, {why}.")


def load_config(path: Path) -> ConfigDict:
    fields = config_fields.read_fields(path)
    if not isinstance(fields, dict) or "system" not in fields:
        raise InputError(f"{path} names no system; give the folder of a training.")
    with refusing_types(path):
        return ConfigDict(fields)


# An absolute path, up to the last slash before its last part. Parts of data are written as
# path,split;path,split and settings as name=path.
_FOLDERS = re.compile(r"(?<![^=,;])[~/][^=,;]*/(?=[^=,;/])")


def without_folders(value: Any) -> Any:
    """The value with all absolute paths in it, at any depth, cut to their last part."""
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_folders(item) for item in value)
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


# ---------------------------------------------------------------- the questions that are scored


@dataclasses.dataclass(frozen=True)
class HalvedEvalConfig:
    """Section `eval` of fixed questions, half of which choose the best checkpoint."""

    samples: Natural = 300  # fixed questions scored during training, 0: all
    seed: int = 42  # draws the scored questions
    # Which are scored: "choosing", the half that chooses the best checkpoint, or "all" questions;
    # evaluate scores the other half, "reported", unless this is "all"
    part: Annotated[str, one_of(HALVES)] = CHOOSING


class Drawn(NamedTuple):
    places: list[int]  # theirs, ascending
    choosing: int  # how many questions may choose the best checkpoint
    apart: bool  # these are others than those that are reported

    def summary(self, chose: int, *, others: bool) -> dict[str, Any]:
        """What a summary says of both sets; `chose`: `eval.samples` of the training."""
        count, choosing = len(self.places), min(chose or self.choosing, self.choosing)
        if others:
            return {"reported": count, "line": f"{count} questions, other ones than the run's"}
        which = f"{count} others" if self.apart else f"{count} of all"
        line = f"{choosing} questions choose the best checkpoint, {which} are scored"
        return {"choosing": choosing, "reported": count, "apart": self.apart, "line": line}


def drawn(ids: Sequence[str], config: Any) -> Drawn:
    """Draws the questions that are scored, of the part that section `eval` names.

    One half of the ids, by their digests, chooses the best checkpoint, and the other is reported.
    Where one half would be empty, all questions do both.
    """
    halves = [[n for n, name in enumerate(ids) if half(name) == side] for side in (0, 1)]
    apart = config.part != ALL and all(map(bool, halves))
    if not apart:
        halves = [[*range(len(ids))]] * 2
    places = chosen_places(halves[config.part == REPORTED], config.samples, config.seed)
    return Drawn(places, len(halves[0]), apart)


def chosen_places(places: Sequence[int], samples: int, seed: int) -> list[int]:
    """So many of the places (0: all), drawn by the seed, in ascending order."""
    order = np.random.default_rng(seed).permutation(len(places))
    return sorted(places[n] for n in order[: samples or len(places)].tolist())
