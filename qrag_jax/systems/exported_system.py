"""What a system says of a language model that it trained, where this is exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ml_collections import ConfigDict

from qrag_jax.models.first_language_model import LanguageModelConfig
from qrag_jax.runtime.runtime_config import RuntimeConfig

Fields = Mapping[str, Any]  # of a config, by section
Scores = Mapping[str, Mapping[str, float]]  # row → metric → mean; all rows have the same metrics


class ExportedConfig(Protocol):
    """What is read here of a system's settings."""

    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> LanguageModelConfig: ...
    @property
    def runtime(self) -> RuntimeConfig: ...


@dataclasses.dataclass(frozen=True)
class ExportedSystem:
    """One system whose language models can be exported.

    Attributes:
        name: of it, in config.system.
        title: its name for readers.
        learned: what its models learn, as in "A language model that learned to …".
        read: the config of a run → its settings; raises `InputError`.
        told: the fields of a config → sentences about prompt, data and what is left out.
        scored: what a row of scores is of, such as "collection".
        scores: the content of `eval/summary.json` and the name of a checkpoint → the scores of this
            checkpoint, {} if there are none; raises KeyError, TypeError or AttributeError if the
            content is no summary.
        private: fields, as SECTION.FIELD, that a card does not show: persons and addresses.
    """

    name: str
    title: str
    learned: str
    read: Callable[[ConfigDict], ExportedConfig]
    told: Callable[[Fields], str]
    scored: str
    scores: Callable[[Fields, str], Scores]
    private: tuple[str, ...] = ("llm.url",)
