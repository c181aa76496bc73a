"""What a row of the suite which is run with, and what its part gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.which_cases.found import Course, Found, Training
from benchmarks.which_cases.measured import Cost
from benchmarks.which_cases.settings import Setting

TRAINED, UNTRAINED = "trained", "untrained"
FUSED = "fused with BM25"
WITH_WORDS = f"{TRAINED}, {FUSED}"
TWICE = f"{TRAINED}, then with its first passage"
TWICE_WITH_WORDS = f"{TWICE}, {FUSED}"
COMPARED_WAYS = (TRAINED, TWICE, WITH_WORDS, TWICE_WITH_WORDS)  # of a row that is trained


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a row is run.

    Attributes:
        setting: that it is trained in.
        others: settings whose test it is scored on, too: transfer.
        folder: of the row's runs, for this setting and seed.
        seed: of the training.
        flags: further fields of the training's config, as the command line has them; those of
            tests and of --quick are small.
        transfer_questions: of another setting's test, for a language model; 0: all.
        every_way: False: its own test alone, by the trained way, and by what it began with if seeds
            differ in that; as in further seeds of slow rows.
    """

    setting: Setting
    folder: Path
    seed: int = 0
    others: tuple[Setting, ...] = ()
    flags: tuple[str, ...] = ()
    transfer_questions: int = 100
    every_way: bool = True


Tests = Mapping[str, Found]  # name of the setting whose test it is → what was read


@dataclasses.dataclass(frozen=True)
class Result:
    """What a part gives.

    Attributes:
        ways: way, such as `TRAINED`, → what it read.
        training: the cost of the way `TRAINED`; None: nothing is trained.
        about: what was chosen, and by what, for the table's notes.
    """

    ways: Mapping[str, Tests]
    training: Training | None = None
    about: str = ""

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        ways = {
            way: {test: found.to_json() for test, found in tests.items()}
            for way, tests in self.ways.items()
        }
        training = None if self.training is None else dataclasses.asdict(self.training)
        return {"ways": ways, "training": training, "about": self.about}

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Result:
        """The inverse of `to_json`."""
        ways = {
            way: {test: Found.of_json(found) for test, found in tests.items()}
            for way, tests in kept["ways"].items()
        }
        training = kept["training"]
        return cls(ways, None if training is None else Training.of_json(training), kept["about"])


def training_of(
    *costs: Cost,
    course: Course | None = None,
    tokens: float | None = None,
    searches: float | None = None,
) -> Training:
    """The cost of a training's commands, and how it went on."""
    cpu, seconds = (sum(getattr(c, name) for c in costs) for name in ("cpu_seconds", "seconds"))
    untold = sum(each.untold for each in costs)
    return Training(cpu / 60, seconds / 60, tokens, searches, untold, course)
