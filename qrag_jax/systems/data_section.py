"""The section `data` of a config: each source's settings stand under the source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data.config import SETTINGS, DataConfig
from qrag_jax.errors import InputError
from qrag_jax.runtime.config_fields import described, fill, section


def source_section(name: str, weight: float = 1.0) -> ConfigDict:
    """The section `data.sources.NAME`: its weight in the mixture, and its own settings."""
    settings = section(SETTINGS[name]) if name in SETTINGS else ConfigDict()
    settings.weight = weight
    return settings


def data_section(sources: Iterable[str]) -> ConfigDict:
    """The section `data` of a run on these sources, each of weight 1."""
    result = section(DataConfig)
    result.sources = ConfigDict({name: source_section(name) for name in sources})
    return result


def fill_data(given: Mapping[str, Any]) -> DataConfig:
    """The settings that a section `data` holds.

    Raises:
        InputError: a field is unknown or cannot be used.
    """
    weights: dict[str, float] = {}
    settings: dict[str, Any] = {}
    for name, source in given.get("sources", {}).items():
        place = f"data.sources.{name}"
        if not isinstance(source, Mapping | ConfigDict):
            raise InputError(f"config.{place} is {source!r}; give config.{place}.weight.")
        fields = dict(source.items())
        weights[name] = fields.pop("weight", 1.0)
        if name in SETTINGS:
            settings[name] = fill(SETTINGS[name], fields, place)
        elif fields:
            raise InputError(f"config.{place}.{min(fields)} is unknown; there is weight.")
    rest = {name: value for name, value in given.items() if name != "sources"}
    return dataclasses.replace(fill(DataConfig, rest, "data"), sources=weights, **settings)


def described_sources() -> list[tuple[str, Any, str]]:
    """Name, default and comment of every setting of every source."""
    share = "share of the training mixture"
    lines: list[tuple[str, Any, str]] = [("data.sources.NAME.weight", 1.0, share)]
    for name, settings in SETTINGS.items():
        lines += described(settings, f"data.sources.{name}")
    return lines
