"""trackio: Hugging Face's tracker, in files of this machine, or in a Space that it is told of."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from qrag_jax.runtime.saved_config import flat
from qrag_jax.runtime.trackers import Start


class TrackioRun:
    """See `trackers.Tracker`."""

    def __init__(self, run: Any) -> None:
        self._run, self.run = run, str(run.name)

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(scalars), step=step)

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        """See `Tracker`."""
        from trackio import Markdown

        self._run.log({name: Markdown(text)}, step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


def begin(start: Start) -> TrackioRun:
    """See `trackers.begin`; it reads the environment, such as TRACKIO_DIR and TRACKIO_SPACE_ID.

    It goes on with the run of a name, so names get an ending that no other run has.
    """
    import trackio

    run = trackio.init(
        project=start.project,
        name=start.kept or f"{start.name}-{secrets.token_hex(4)}",
        resume="allow",
        config=flat(start.config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun(run)
