"""Whether a run is scored on its own questions; scores on others belong into another folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.runtime.saved_config import CONFIG_NAME, flat, read_fields

ASKED = ("questions.dev", "questions.bridge_seed")  # fields that say what is evaluated on


def of_others(workdir: Path, given: ConfigDict, parts: Sequence[str]) -> list[str]:
    """The fields of questions that are not as in the run's config, as `config.FIELD`.

    Args:
        given: the config in use.
        parts: beginnings of the names of fields that say what is asked.
    """
    old, new = flat(read_fields(workdir / CONFIG_NAME)), flat(given.to_dict())
    return [
        f"config.{name}"
        for name in sorted(new)
        if name.startswith(tuple(parts)) and old.get(name) != new[name]
    ]


def check_own_questions(workdir: Path, given: ConfigDict, parts: Sequence[str]) -> None:
    """Refuses other questions than the run's; see `of_others`.

    Raises:
        InputError: a field differs.
    """
    if differing := of_others(workdir, given, parts):
        raise InputError(
            f"the questions are not the run's own (not as in its config: {', '.join(differing)}); "
            f"give --out=FOLDER for scores on others, since {workdir / 'eval'} is for its own."
        )


def are_others(workdir: Path, given: ConfigDict, parts: Sequence[str], *, out: Path | None) -> bool:
    """Whether other questions than the run's are scored; see `of_others`.

    Args:
        out: the folder that is named for the scores; None: none is.

    Raises:
        InputError: they are others, and no folder is named.
    """
    if out is None:
        check_own_questions(workdir, given, parts)
        return False
    return bool(of_others(workdir, given, parts))
