"""One class and one function for each tracker's library, imported where it is used.

wandb: a run of Weights & Biases, at its service, at a server of one's own, or in files here.
mlflow: a run in an experiment, at a server or in a database, as MLFLOW_TRACKING_URI says.
trackio: Hugging Face's tracker, in files of this machine, or in a Space that the environment names.
"""

from __future__ import annotations

import html
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from qrag_jax.runtime.saved_config import flat
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
        self._run.log({**scalars, _STEP: step}, step=row, commit=True)

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        # W&B shows HTML and no Markdown, so the text is shown as it is written.
        from wandb import Html

        page = Html(f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>", inject=False)
        self._run.log({name: page, _STEP: step}, step=row, commit=True)

    def close(self) -> None:
        self._run.finish()


def begin_wandb(start: Start) -> WandbRun:
    """W&B reads the environment, such as WANDB_MODE and WANDB_API_KEY.

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


_UNKNOWN_MARK = re.compile(r"[^\w\-. :/]", re.ASCII)  # it refuses them in names
_MOST_PARAMETERS = 100  # of one request
_LONGEST = 6000  # characters of a parameter's value


class MlflowRun:
    """See `trackers.Tracker`."""

    def __init__(self, client: Any, run: str) -> None:
        self._client, self.run = client, run

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self.run, metrics=metrics)

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        # The text is an artifact, `NAME/STEP.md`.
        self._client.log_text(self.run, text, f"{_name(name)}/{step:09d}.md")

    def close(self) -> None:
        self._client.set_terminated(self.run)


def begin_mlflow(start: Start) -> MlflowRun:
    """Parameters cannot change there: those of the first start stay.

    The artifact `config.json` has those of the newest.
    """
    from mlflow import MlflowClient

    client = MlflowClient()
    if start.kept:
        run = start.kept
        client.update_run(run, status="RUNNING")
    else:
        run = client.create_run(_experiment(client, start.project), run_name=start.name).info.run_id
        _write_parameters(client, run, start.config)
    client.log_dict(run, dict(start.config), "config.json")
    return MlflowRun(client, run)


def _experiment(client: Any, name: str) -> str:
    """The id of the experiment, which is made if there is none."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name)
        except MlflowException:  # another run has made it meanwhile
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def _write_parameters(client: Any, run: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    found = [Param(_name(name), str(value)[:_LONGEST]) for name, value in flat(config).items()]
    for first in range(0, len(found), _MOST_PARAMETERS):
        client.log_batch(run, params=found[first : first + _MOST_PARAMETERS])


def _name(name: str) -> str:
    return _UNKNOWN_MARK.sub("_", name)


class TrackioRun:
    """See `trackers.Tracker`."""

    def __init__(self, run: Any) -> None:
        self._run, self.run = run, str(run.name)

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        from trackio import Markdown

        self._run.log({name: Markdown(text)}, step=step)

    def close(self) -> None:
        self._run.finish()


def begin_trackio(start: Start) -> TrackioRun:
    """trackio reads the environment, such as TRACKIO_DIR and TRACKIO_SPACE_ID.

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
