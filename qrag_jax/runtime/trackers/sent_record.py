"""What was sent to a tracker, kept in the run's folder, so that nothing is sent twice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json, typed_json, whole_files


@dataclasses.dataclass
class SentRecord:
    """The record of one tracker.

    Attributes:
        run: what names the run there; "": it has not begun.
        rows: number of rows sent, over all starts.
        steps: the last step sent, by the metric's name. Steps grow, so this says all.
    """

    run: str = ""
    rows: int = 0
    steps: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SentRecord:
        """That of the file, or a new one if there is none."""
        try:
            return typed_json.made(cls, bounded_json.load(path))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{path} says what was sent to a tracker and cannot be read "
                f"({whole_files.reason(error)}); delete it to begin a new run there."
            ) from None

    def save(self, path: Path) -> None:
        """Writes the file.

        Raises:
            OSError: it cannot be written.
        """
        whole_files.write_whole(path, json.dumps(dataclasses.asdict(self)) + "\n")

    def take(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that were not sent for this step or a later one; they now count as sent."""
        new = {name: each for name, each in values.items() if step > self.steps.get(name, -1)}
        self.steps |= dict.fromkeys(new, step)
        return new
