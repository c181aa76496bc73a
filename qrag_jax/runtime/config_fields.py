"""Config sections: dataclasses, with defaults, types and comments; and how a run keeps them.

`internal` makes a field that no config has, because the code sets it. The comment of a field stands
behind it or on the lines above it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import ml_collections
from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from qrag_jax.errors import Count, InputError, Natural, Rule, Weight, some_of
from qrag_jax.runtime import whole_files
from qrag_jax.runtime.bounded_json import INTERNAL, BadJSONError, typed
from qrag_jax.runtime.whole_files import reading

_FIX = "compare it with --help, or restore it from a backup"
# Comments on the lines above, a field's name, and the comment behind it. No default holds a "#".
_FIELD = re.compile(r"((?:^    #.*\n)*)^    (\w+): [^#\n]*(?:# (.*))?$", re.MULTILINE)


def internal(default: Any = None, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field of a dataclass that is in no config, with its default, or what makes it."""
    metadata = {INTERNAL: " "}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def refusing_types(what: object, fix: str = _FIX) -> Any:
    """A block, or a decorated function, that reads a config, whose values may be of any type."""
    wrong = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError)
    return reading(what, fix, wrong)


def fields_of(settings: type) -> list[dataclasses.Field]:
    """The fields that a config has."""
    return [field for field in dataclasses.fields(settings) if INTERNAL not in field.metadata]


def typed_fields(settings: type) -> Iterator[tuple[dataclasses.Field, Any, Any]]:
    """The fields that a config has, each with its type and the dataclass in it, or None."""
    hints = typing.get_type_hints(settings, include_extras=True)
    for field in fields_of(settings):
        nested = next(filter(dataclasses.is_dataclass, kinds_of(hints[field.name])), None)
        yield field, hints[field.name], nested


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type, with their rules."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def section(settings: type, **values: Any) -> ConfigDict:
    """The config section for a dataclass, with its defaults, or `values` in their place."""
    result = ConfigDict()
    for field, kind, nested in typed_fields(settings):
        value = _default(field)
        others = [other for other in kinds_of(kind) if other is not types.NoneType]
        if nested is not None:
            value = section(nested)
        elif len(others) > 1:  # a reference gives ConfigDict the type if the default does not
            value = FieldReference(value, field_type=object)
        elif value is None:
            value = placeholder(getattr(others[0], "__origin__", others[0]))  # without rules
        result[field.name] = value
    result.update(values)
    return result


def check(settings: Any, prefix: str) -> None:
    """Checks a dataclass that no config has filled; `prefix` is before the fields' names."""
    for field, kind, nested in typed_fields(type(settings)):
        if nested is None:
            check_value(kind, getattr(settings, field.name), f"{prefix}{field.name}")


def check_value(kind: Any, value: Any, name: str) -> Any:
    """The value of a field, or the dataclass of a section, whose missing fields are the defaults.

    It must have its type and keep its rules (`errors.Rule`), see `bounded_json.typed`.
    """
    try:
        return typed(kind, value, name)
    except BadJSONError as error:
        raise InputError(f"{error}.") from None


def described(settings: type, place: str) -> list[tuple[str, Any, str]]:
    """Name, default and comment of every field, also of nested sections, by their names."""
    lines: list[tuple[str, Any, str]] = []
    for field, _, nested in typed_fields(settings):
        name = f"{place}.{field.name}" if place else field.name
        if nested is not None:
            lines += described(nested, name)
        else:
            lines.append((name, _default(field), comments(settings).get(field.name, "")))
    lines += settings.further_help(place) if hasattr(settings, "further_help") else []
    return sorted(lines, key=lambda line: line[0].split("."))


@functools.cache
def comments(settings: type) -> dict[str, str]:
    """The comment of each field, including the fields of base classes."""
    texts: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(settings.__mro__)):
        for above, name, behind in _FIELD.findall(inspect.getsource(cls)):
            lines = [*re.findall(r"# ?(.*)", above), *([behind] if behind else [])]
            if lines and name in cls.__annotations__:
                texts[name] = " ".join(lines)
    return texts


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


# ---------------------------------------------------------------- in a run's folder


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


def read_fields(path: Path) -> dict[str, Any]:
    """The fields that `save_config` wrote; lists become tuples again."""
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
        raise InputError(f"config.{field} is {size}; use a multiple of {parts} (split over {of}).")


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
