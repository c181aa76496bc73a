"""MLflow: a run in an experiment, at a server or in a database, as MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from qrag_jax.runtime.saved_config import flat
from qrag_jax.runtime.trackers import Start

_UNKNOWN_MARK = re.compile(r"[^\w\-. :/]", re.ASCII)  # it refuses them in names
_MOST_PARAMETERS = 100  # of one request
_LONGEST = 6000  # characters of a parameter's value


class MlflowRun:
    """See `trackers.Tracker`."""

    def __init__(self, client: Any, run: str) -> None:
        self._client, self.run = client, run

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`; `recall@5` is called `recall_5` there."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self.run, metrics=metrics)

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        """See `Tracker`; the text is an artifact, `NAME/STEP.md`."""
        self._client.log_text(self.run, text, f"{_name(name)}/{step:09d}.md")

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self.run)


def begin(start: Start) -> MlflowRun:
    """See `trackers.begin`.

    Parameters cannot change there. So those of the first start stay, and the artifact `config.json`
    has those of the newest.
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
