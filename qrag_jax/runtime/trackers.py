"""Trackers: programs and services that keep the metrics of many runs (W&B, MLflow, trackio).

A thread feeds each, so that neither its errors nor its waits reach a run. What was sent is recorded
before it is sent: after a kill a line may be missing in the tracker, but none is there twice. What
is still waiting then is sent by the next start, out of `metrics.jsonl`.
"""

from __future__ import annotations

import html
import importlib.util
import itertools
import json
import netrc
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from qrag_jax.errors import InputError
from qrag_jax.runtime import whole_files
from qrag_jax.runtime.saved_config import WANDB, LogConfig, flat

FOLDER = "trackers"  # in the run's folder: what was sent to each
MOST_WAITING = 20_000  # lines; a tracker that is away must not fill the memory
_KEPT = "metrics.jsonl has every line"
_SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)S?", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=//)[^/@\s]+@")  # user:password@
_SHORTEST = 8  # characters; a shorter value may be an everyday word

Values = Mapping[str, float | str]  # finite scalars, and texts in Markdown
Line = tuple[int, Values]  # optimizer steps done


class Start(NamedTuple):
    """What a tracker begins with."""

    workdir: Path
    project: str
    name: str  # what people call the run
    config: Mapping[str, Any]  # all fields of the experiment, in nested sections
    kept: str = ""  # `Tracker.run` of an earlier start


class Tracker(Protocol):
    """One run in a tracker; `run` names it there for later starts. Methods may raise anything."""

    run: str

    def write(self, row: int, step: int, values: Values) -> None:
        """Adds values; `row` grows with every call, over all starts, and `step` may fall."""

    def close(self) -> None:
        """Waits until everything has arrived, and ends the run there."""


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
    if WANDB in log.trackers and not _has_wandb_key():
        raise InputError(
            "config.log.to has wandb, and there is no key for it: set the environment variable "
            "WANDB_API_KEY, or WANDB_MODE=offline to keep the run on this machine."
        )


def _has_wandb_key() -> bool:
    """Whether W&B will find a key or needs none; else it would ask on the terminal and wait."""
    if os.environ.get("WANDB_MODE", "") in ("offline", "dryrun", "disabled"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    file = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
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
        return [*map(clean, fields)]
    return without_secrets(fields) if isinstance(fields, str) else fields


class Sender:
    """Gives lines to a tracker in their order.

    Args:
        name: of the tracker, for what the user reads.
        begin: begins the run there; called in the thread, with `Tracker.run` of an earlier start.
        path: the record of what was sent, kept in the run's folder: `run`, the number of `rows`
            over all starts, and the last of the `steps` of each metric.
        tell: takes one sentence for the user.
        earlier: gives the lines of earlier starts; called in the thread.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[str], Tracker],
        path: Path,
        tell: Callable[[str], None],
        earlier: Callable[[], Iterable[Line]] = tuple,
    ) -> None:
        self._name, self._begin, self._path, self._tell = name, begin, path, tell
        self._earlier, self._failed = earlier, 0  # lines that could not be sent
        self._sent: dict[str, Any] = {"run": "", "rows": 0, "steps": {}}
        if path.exists():
            self._sent = json.loads(path.read_text())
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Values) -> None:
        """Takes a line and returns at once."""
        if not self._thread.is_alive():
            return  # the tracker could not begin
        if self._lines.qsize() < MOST_WAITING:
            self._lines.put((step, values))
        else:
            self._fail("too many lines are waiting")

    def end(self) -> None:
        """Says that no more lines follow; returns at once."""
        self._lines.put(None)

    def wait(self, seconds: float) -> None:
        """Waits after `end` until all is sent, but only so long; tells what was not sent."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell(
                f"{self._name} has not taken all lines after {seconds:.0f} s, and is left; {_KEPT}"
            )
        elif self._failed > 1:
            self._tell(f"{self._name}: {self._failed} lines were not sent; {_KEPT}")

    def _run(self) -> None:
        """The thread. Libraries raise any class of error, and SystemExit, too."""
        try:
            tracker = self._begin(self._sent["run"])
            self._sent["run"] = tracker.run
            self._save()
            lines = [*self._earlier()]
        except (Exception, SystemExit) as error:
            self._tell(
                f"{self._name} cannot be used ({_reason(error)}); the training goes on without it, "
                f"{_KEPT}, and the next start sends them"
            )
            return
        for step, values in itertools.chain(lines, iter(self._lines.get, None)):
            self._send(tracker, step, values)
        try:
            tracker.close()
        except (Exception, SystemExit) as error:
            self._fail(_reason(error))

    def _save(self) -> None:
        whole_files.write_whole(self._path, json.dumps(self._sent) + "\n")

    def _send(self, tracker: Tracker, step: int, values: Values) -> None:
        """Sends what was not sent for this step or a later one; if that is recorded first."""
        last, row = self._sent["steps"], self._sent["rows"]
        values = {name: value for name, value in values.items() if step > last.get(name, -1)}
        if values:
            last |= dict.fromkeys(values, step)
            self._sent["rows"] += 1
            try:
                self._save()
                tracker.write(row, step, values)
            except (Exception, SystemExit) as error:
                self._fail(_reason(error))

    def _fail(self, why: str) -> None:
        self._failed += 1
        if self._failed == 1:
            self._tell(
                f"{self._name}: a line was not sent ({why}); the training goes on, {_KEPT}, and "
                "further ones are only counted"
            )


def close_all(senders: list[Sender], seconds: float) -> None:
    """Ends all of them at once; waits so long at most."""
    until = time.monotonic() + seconds
    for sender in senders:
        sender.end()
    for sender in senders:
        sender.wait(max(0.0, until - time.monotonic()))


def _reason(error: BaseException) -> str:
    return without_secrets(whole_files.reason(error)).rstrip(".")


# ---------------------------------------------------------------------- the libraries


def senders(
    log: LogConfig,
    workdir: Path,
    config: Mapping[str, Any],
    tell: Callable[[str], None],
    earlier: Callable[[], Iterable[Line]],
) -> list[Sender]:
    """What feeds each tracker of a run; for the arguments see `Sender`."""
    start = Start(workdir, log.project, log.name or workdir.resolve().name, clean(config))

    def sender(name: str) -> Sender:
        def begun(kept: str) -> Tracker:
            return begin(name, start._replace(kept=kept))

        return Sender(name, begun, workdir / FOLDER / f"{name}.json", tell, earlier)

    return [*map(sender, log.trackers)]


def begin(tracker: str, start: Start) -> Tracker:
    """Begins the run in a tracker, or goes on in it; may raise anything."""
    runs: dict[str, Callable[[Start], Tracker]] = {"wandb": WandbRun, "mlflow": MlflowRun}
    return (runs | {"trackio": TrackioRun})[tracker](start)


class _LoggedRun:
    """A run whose library has `log` and `finish`."""

    _run: Any
    _shown: Callable[[str], Any]  # a text as the library takes it

    def write(self, row: int, step: int, values: Values) -> None:
        """As `Tracker` has it."""
        shown = {n: self._shown(v) if isinstance(v, str) else v for n, v in values.items()}
        self._log(row, step, shown)

    def _log(self, row: int, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        """As `Tracker` has it."""
        self._run.finish()


class WandbRun(_LoggedRun):
    """At W&B's service, at a server of one's own, or in files here; the environment says it.

    W&B drops rows whose own step is not above that of all before, and an evaluation that a resumed
    run repeats may have a lower one. So its own step is the number of the row, and the charts are
    over a metric `step`. No code, git state or output of the terminal is sent.
    """

    def __init__(self, start: Start) -> None:
        import wandb

        def page(text: str) -> Any:  # W&B shows HTML and no Markdown: the text is shown as it is
            style = "white-space: pre-wrap"
            return wandb.Html(f"<pre style='{style}'>{html.escape(text)}</pre>", inject=False)

        self._shown = page
        self._run = wandb.init(
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
                init_timeout=30,  # seconds until the service is said to be away
                # Offline a kill loses no more than this second (W&B's own: 15).
                x_transaction_log_flush_interval=1.0,
                login_timeout=1,  # should it ask for a key all the same
            ),
        )
        self.run = str(self._run.id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _log(self, row: int, step: int, values: dict[str, Any]) -> None:
        self._run.log({**values, "step": step}, step=row, commit=True)


class TrackioRun(_LoggedRun):
    """In files of this machine, or in a Space, as TRACKIO_DIR and TRACKIO_SPACE_ID say.

    trackio goes on with the run of a name, so names get an ending that no other run has.
    """

    def __init__(self, start: Start) -> None:
        import trackio

        self._shown = trackio.Markdown
        self._run = trackio.init(
            project=start.project,
            name=start.kept or f"{start.name}-{secrets.token_hex(4)}",
            resume="allow",
            config=flat(start.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.run = str(self._run.name)


class MlflowRun:
    """In an experiment, at a server or in a database, as MLFLOW_TRACKING_URI says.

    Parameters cannot change there: those of the first start stay, and the artifact `config.json`
    has those of the newest. A text is an artifact, `NAME/STEP.md`.
    """

    def __init__(self, start: Start) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._client, self.run, self._metric = mlflow.MlflowClient(), start.kept, Metric
        if self.run:
            self._client.update_run(self.run, status="RUNNING")
        else:
            experiment = mlflow.set_experiment(start.project).experiment_id  # new or there
            self.run = self._client.create_run(experiment, run_name=start.name).info.run_id
            fields = [
                (_name(name), str(value)[:6000]) for name, value in flat(start.config).items()
            ]
            params = [Param(*field) for field in fields]
            for first in range(0, len(params), 100):  # as many as one request takes
                self._client.log_batch(self.run, params=params[first : first + 100])
        self._client.log_dict(self.run, dict(start.config), "config.json")

    def write(self, row: int, step: int, values: Values) -> None:
        """As `Tracker` has it."""
        now, metrics = int(time.time() * 1000), []
        for name, value in values.items():
            if isinstance(value, str):
                self._client.log_text(self.run, value, f"{_name(name)}/{step:09d}.md")
            else:
                metrics.append(self._metric(_name(name), value, now, step))
        if metrics:
            self._client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        """As `Tracker` has it."""
        self._client.set_terminated(self.run)


def _name(name: str) -> str:
    """Without marks that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
