"""Trackers: programs and services that keep the metrics of many runs (W&B, MLflow, trackio).

`libraries` has one class for each, `sender` the thread that feeds it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from qrag_jax.errors import InputError
from qrag_jax.runtime.train_config import WANDB, LogConfig

FOLDER = "trackers"  # in the run's folder: what was sent to each
_SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)S?", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=//)[^/@\s]+@")  # user:password@
_SHORTEST = 8  # characters; a shorter value may be an everyday word
_WANDB_WITHOUT_KEY = ("offline", "dryrun", "disabled")
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_WANDB_HOST = "https://api.wandb.ai"


class Tracker(Protocol):
    """One run in a tracker. Its methods may raise anything.

    Attributes:
        run: what names the run there, so that a later start goes on in it.
    """

    @property
    def run(self) -> str: ...

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        """Adds finite scalars.

        Args:
            row: grows with every call, over all starts of the run.
            step: number of optimizer steps done; it may be lower than that of an earlier call.
        """
        ...

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        """Adds a text in Markdown; `row` and `step` are those of `write`."""
        ...

    def close(self) -> None:
        """Waits until everything has arrived, and ends the run there."""
        ...


@dataclasses.dataclass(frozen=True)
class Start:
    """What a tracker begins with.

    Attributes:
        workdir: the run's folder.
        project: the project that the run belongs to.
        name: what people call the run.
        config: all fields of the experiment, in nested sections.
        kept: `Tracker.run` of an earlier start; "": there was none.
    """

    workdir: Path
    project: str
    name: str
    config: Mapping[str, Any]
    kept: str = ""


def begin(tracker: str, start: Start) -> Tracker:
    """Begins the run in a tracker, or goes on in it; may raise anything."""
    from qrag_jax.runtime.trackers import libraries

    return getattr(libraries, f"begin_{tracker}")(start)


def check_usable(log: LogConfig) -> None:
    """Refuses trackers that cannot be used on this machine, before anything is computed.

    What depends on a network is not asked: a server that is away must not end a training.
    """
    for name in log.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb's own files
            raise InputError(
                f"config.log.to has {name}, which is not installed: run pip install "
                f"'qrag_jax[{name}]', or leave it out."
            )
    if WANDB in log.trackers and not has_wandb_key():
        raise InputError(
            "config.log.to has wandb, and there is no key for it: set the environment variable "
            "WANDB_API_KEY, or WANDB_MODE=offline to keep the run on this machine."
        )


def has_wandb_key() -> bool:
    """Whether W&B will find a key or needs none; else it would ask on the terminal and wait."""
    if os.environ.get("WANDB_MODE", "") in _WANDB_WITHOUT_KEY:
        return True
    if any(os.environ.get(name) for name in _WANDB_KEYS):
        return True
    file = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _WANDB_HOST).hostname or ""
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def without_secrets(text: str) -> str:
    """The text without values of environment variables for keys, and without user:password@."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET.fullmatch(name):
            text = text.replace(value, f"${name}")
    return _IN_ADDRESS.sub("", text)


def clean(fields: Any) -> Any:
    """The same fields, in nested sections and lists, with such texts alone."""
    if isinstance(fields, Mapping):
        return {name: clean(value) for name, value in fields.items()}
    if isinstance(fields, list | tuple):
        return [clean(value) for value in fields]
    return without_secrets(fields) if isinstance(fields, str) else fields
