"""W&B: a run of Weights & Biases, at its service, at a server of one's own, or in files here."""

from __future__ import annotations

import html
import secrets
from collections.abc import Mapping
from typing import Any

from qrag_jax.runtime.trackers import Start

_STEP = "step"  # the axis of all charts
_PATIENCE = 30  # seconds until the service is said to be away
_FLUSH = 1.0  # seconds; offline a kill loses no more than this (W&B's own: 15)


class WandbRun:
    """See `trackers.Tracker`.

    W&B drops rows whose own step is not above that of all before, and an evaluation that a resumed
    run repeats may have a lower one. So its own step is the number of the row, and the charts are
    over a metric `step`.
    """

    def __init__(self, run: Any) -> None:
        self._run, self.run = run, str(run.id)
        run.define_metric(_STEP, hidden=True)
        run.define_metric("*", step_metric=_STEP)

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**scalars, _STEP: step}, step=row, commit=True)

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        """See `Tracker`; it shows HTML and no Markdown, so the text is shown as it is written."""
        from wandb import Html

        page = Html(f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>", inject=False)
        self._run.log({name: page, _STEP: step}, step=row, commit=True)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


def begin(start: Start) -> WandbRun:
    """See `trackers.begin`; W&B reads the environment, such as WANDB_MODE and WANDB_API_KEY.

    No code, no state of a git repository and no output of the terminal is sent.
    """
    import wandb

    run = wandb.init(
        project=start.project,
        name=start.name,
        id=start.kept or secrets.token_hex(4),
        resume="allow",
        dir=str(start.workdir),
        config=dict(start.config),
        settings=wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            init_timeout=_PATIENCE,
            x_transaction_log_flush_interval=_FLUSH,
            login_timeout=1,  # should it ask for a key all the same
        ),
    )
    return WandbRun(run)
