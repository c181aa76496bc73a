"""Where a training writes: `metrics.jsonl`, `episodes.jsonl`, TensorBoard files; trackers.

Trackers are programs and services that keep the metrics of many runs (W&B, MLflow, trackio). A
thread feeds each, so that neither its errors nor its waits reach a run. What was sent is recorded
before it is sent: after a kill a line may be missing in the tracker, but none is there twice. What
is still waiting then is sent by the next start, out of `metrics.jsonl`.
"""

from __future__ import annotations

import html
import importlib.util
import itertools
import json
import math
import netrc
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat
from urllib.parse import urlsplit

from qrag_jax.errors import InputError
from qrag_jax.runtime.config_fields import SECRET, TENSORBOARD, WANDB, LogConfig, flat
from qrag_jax.runtime.whole_files import reason, replacing, write_json

METRICS_NAME = "metrics.jsonl"
EPISODES_NAME = "episodes.jsonl"
PATIENCE = 60  # seconds that the end of a training waits for its trackers
FOLDER = "trackers"  # in the run's folder: what was sent to each
MOST_WAITING = 20_000  # lines; a tracker that is away must not fill the memory
_KEPT = f"{METRICS_NAME} has every line"
_IN_ADDRESS = re.compile(r"(?<=//)[^/@\s]+@")  # user:password@
_SHORTEST = 8  # characters; a shorter value may be an everyday word

Values = Mapping[str, float | str]  # finite scalars, and texts in Markdown
Line = tuple[int, Values]  # optimizer steps done


class Logged(NamedTuple):
    """Where a training's metrics go, and what trackers get of it."""

    settings: LogConfig = LogConfig()
    config: Mapping[str, Any] = {}  # all fields of the experiment, in nested sections
    tell: Callable[[str], None] = print  # takes one sentence for the user


class MetricWriter:
    """Writes scalars per optimizer step; a killed and resumed run has no step twice.

    For one process (the first of a multi-host run), which closes it.

    Args:
        resume_step: the step of the checkpoint from which the run resumes; -1: there is none.
            Later lines, and one torn by a kill, are dropped; TensorBoard hides later events.
        logged: where else metrics go. A tracker is first sent the lines that it lacks.
    """

    def __init__(self, workdir: Path, resume_step: int, logged: Logged) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        path, self._episodes = workdir / METRICS_NAME, workdir / EPISODES_NAME
        for log in (path, self._episodes):
            _drop_after(log, resume_step)
        # Unbuffered: when `write` returns, the whole line is in the file, even if a kill follows.
        self._file = path.open("ab", buffering=0)
        self._board = None
        if TENSORBOARD in logged.settings.to:
            self._board = _summary_writer()(
                str(workdir / TENSORBOARD),
                purge_step=resume_step + 1,
                flush_secs=20,
                # File names hold whole seconds; a resume in the same second would overwrite a file.
                filename_suffix=f".{time.time_ns()}",
            )
        trackers, logged = logged.settings.trackers, logged._replace(config=clean(logged.config))
        self._senders = [Sender(tracker, workdir, logged) for tracker in trackers]

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Adds one line and one TensorBoard scalar per metric; what is not finite is null."""
        scalars = {name: float(value) for name, value in metrics.items()}
        known = _finite(scalars)
        record = {"step": int(step)} | {name: known.get(name) for name in scalars}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, int(step))
        for sender in self._senders:
            sender.put((int(step), known))

    def write_episodes(
        self, step: int, kind: str, rows: Sequence[Mapping[str, Any]], text: str
    ) -> None:
        """Keeps episodes of an evaluation, in the place of those of its step and later ones.

        Args:
            kind: of the rows, one of `evaluators.evaluation.KINDS`.
            rows: JSON objects with finite numbers; lines of `episodes.jsonl` are
                `{"step", "kind", "row"}`.
            text: the same in Markdown, for TensorBoard and trackers.
        """
        _drop_after(self._episodes, step - 1)  # a resumed run repeats an evaluation
        with self._episodes.open("a", encoding="utf-8") as file:
            for row in rows:
                line = {"step": step, "kind": kind, "row": row}
                file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._board is not None:
            self._board.add_text("episodes", text, int(step))
        for sender in self._senders:
            sender.put((int(step), {"episodes": text}))

    def close(self) -> None:
        """Closes the files, and waits for trackers, but not longer than `PATIENCE`."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        until = time.monotonic() + PATIENCE
        for sender in self._senders:
            sender.put(None)
        for sender in self._senders:
            sender.wait(max(0.0, until - time.monotonic()))


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    """What is not finite has no place in a tracker's charts."""
    return {name: value for name, value in scalars.items() if math.isfinite(value)}


def _summary_writer() -> Any:
    """The class, imported without torch.

    tensorboardX imports torch where it is installed. That takes seconds and serves only torch's
    tensors, which are never written here.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Lines of a `metrics.jsonl`, oldest first; null becomes NaN, a torn last line is left out."""
    if not path.is_file():
        raise InputError(f"{path} does not exist: name the folder of a run that has trained")
    rows = (record.items() for _, record in _whole_lines(path))
    return [{name: math.nan if x is None else x for name, x in row} for row in rows]


def has_evaluation(workdir: Path) -> bool:
    """Whether a run's metrics hold an evaluation of trained weights, and not only of the first."""
    path = workdir / METRICS_NAME
    rows = read_metrics(path) if path.is_file() else []
    return any(row["step"] > 0 and any(name.startswith("eval/") for name in row) for row in rows)


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line, json.loads(line)


def _drop_after(path: Path, step: int) -> None:
    """Drops lines of later steps and a torn one, if there is such a file."""
    if path.exists():
        with replacing(path) as file:
            file.writelines(line for line, row in _whole_lines(path) if row["step"] <= step)


# ---------------------------------------------------------------------- trackers


def check_usable(log: LogConfig) -> None:
    """Refuses trackers that cannot be used on this machine, before anything is computed.

    What depends on a network is not asked: a server that is away must not end a training.
    """
    for name in log.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb's own files
            raise InputError(f"config.log.to: {name} needs pip install 'qrag_jax[{name}]'.")
    if WANDB in log.trackers and not _has_wandb_key():
        fix = "set WANDB_API_KEY, or WANDB_MODE=offline to keep the run on this machine."
        raise InputError(f"config.log.to has wandb, and there is no key for it: {fix}")


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
        if len(value) >= _SHORTEST and SECRET.fullmatch(name):
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
    """Gives lines to a tracker in their order, those of earlier starts first.

    `workdir/trackers/NAME.json` records what was sent: `run`, the number of `rows` over all starts,
    and the last of the `steps` of each metric.
    """

    def __init__(self, name: str, workdir: Path, logged: Logged) -> None:
        self._name, self._workdir, self._logged = name, workdir, logged
        self._tell = logged.tell
        self._failed = 0  # lines that could not be sent
        self._path = workdir / FOLDER / f"{name}.json"
        self._sent: dict[str, Any] = {"run": "", "rows": 0, "steps": {}}
        if self._path.exists():
            self._sent = json.loads(self._path.read_text())
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, line: Line | None) -> None:
        """Takes a line and returns at once; None says that no more lines follow."""
        if line is not None and self._lines.qsize() >= MOST_WAITING:
            self._fail("too many lines are waiting")
        elif self._thread.is_alive():  # else the tracker could not begin
            self._lines.put(line)

    def wait(self, seconds: float) -> None:
        """Waits until all is sent, but only so long; tells what was not sent."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell(f"{self._name} is left before it has taken all lines; {_KEPT}")
        elif self._failed > 1:
            self._tell(f"{self._name}: {self._failed} lines were not sent; {_KEPT}")

    def _run(self) -> None:
        """The thread. Libraries raise any class of error, and SystemExit, too."""
        try:
            begun = begin(self._name, self._workdir, self._logged, self._sent["run"])
            self._sent["run"], write, close = begun
            write_json(self._path, self._sent)
            path = self._workdir / METRICS_NAME
            rows = read_metrics(path) if path.exists() else []
        except (Exception, SystemExit) as error:
            self._tell(f"{self._name} cannot be used ({_reason(error)}); training goes on, {_KEPT}")
            return
        earlier = ((int(row.pop("step")), _finite(row)) for row in rows)
        for step, values in itertools.chain(earlier, iter(self._lines.get, None)):
            try:
                self._send(write, step, values)
            except (Exception, SystemExit) as error:
                self._fail(_reason(error))
        try:
            close()
        except (Exception, SystemExit) as error:
            self._fail(_reason(error))

    def _send(self, write: Callable[..., object], step: int, values: Values) -> None:
        """Sends what was not sent for this step or a later one; if that is recorded first."""
        last, row = self._sent["steps"], self._sent["rows"]
        values = {name: value for name, value in values.items() if step > last.get(name, -1)}
        if values:
            last |= dict.fromkeys(values, step)
            self._sent["rows"] += 1
            write_json(self._path, self._sent)
            write(row, step, values)

    def _fail(self, why: str) -> None:
        self._failed += 1
        if self._failed == 1:
            self._tell(f"{self._name}: a line was not sent ({why}); {_KEPT}; more are only counted")


def _reason(error: BaseException) -> str:
    return without_secrets(reason(error)).rstrip(".")


# ---------------------------------------------------------------------- the libraries


# The run's name there for later starts; what adds values of a step, where the row's number grows
# with every call, over all starts, and the step may fall; what waits until everything has arrived,
# and ends the run there. All of it may raise anything.
Opened = tuple[str, Callable[[int, int, Values], object], Callable[[], object]]


def begin(tracker: str, workdir: Path, logged: Logged, kept: str) -> Opened:
    """Begins the run in a tracker, or goes on in that of an earlier start, `kept`."""
    return {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}[tracker](workdir, logged, kept)


def _with_texts(values: Values, shown: Callable[[str], Any]) -> dict[str, Any]:
    return {n: shown(value) if isinstance(value, str) else value for n, value in values.items()}


def _wandb(workdir: Path, logged: Logged, kept: str) -> Opened:
    """At W&B's service, at a server of one's own, or in files here; the environment says it.

    W&B drops rows whose own step is not above that of all before, and an evaluation that a resumed
    run repeats may have a lower one. So its own step is the number of the row, and the charts are
    over a metric `step`. No code, git state or output of the terminal is sent.
    """
    import wandb

    run = wandb.init(
        project=logged.settings.project,
        name=workdir.resolve().name,
        id=kept or secrets.token_hex(4),
        resume="allow",
        dir=str(workdir),
        config=dict(logged.config),
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
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")

    def page(text: str) -> Any:  # W&B shows HTML and no Markdown: the text is shown as it is
        style = "white-space: pre-wrap"
        return wandb.Html(f"<pre style='{style}'>{html.escape(text)}</pre>", inject=False)

    def write(row: int, step: int, values: Values) -> None:
        run.log(_with_texts(values, page) | {"step": step}, step=row, commit=True)

    return str(run.id), write, run.finish


def _trackio(workdir: Path, logged: Logged, kept: str) -> Opened:
    """In files of this machine, or in a Space, as TRACKIO_DIR and TRACKIO_SPACE_ID say.

    trackio goes on with the run of a name, so names get an ending that no other run has.
    """
    import trackio

    run = trackio.init(
        project=logged.settings.project,
        name=kept or f"{workdir.resolve().name}-{secrets.token_hex(4)}",
        resume="allow",
        config=flat(logged.config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    def write(row: int, step: int, values: Values) -> None:
        run.log(_with_texts(values, trackio.Markdown), step=step)

    return str(run.name), write, run.finish


def _mlflow(workdir: Path, logged: Logged, kept: str) -> Opened:
    """In an experiment, at a server or in a database, as MLFLOW_TRACKING_URI says.

    Parameters cannot change there: those of the first start stay, and the artifact `config.json`
    has those of the newest. A text is an artifact, `NAME/STEP.md`.
    """
    import mlflow
    from mlflow.entities import Metric, Param

    def known(name: str) -> str:  # without marks that MLflow refuses
        return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)

    client, run = mlflow.MlflowClient(), kept
    if run:
        client.update_run(run, status="RUNNING")
    else:
        experiment = mlflow.set_experiment(logged.settings.project).experiment_id  # new or there
        run = client.create_run(experiment, run_name=workdir.resolve().name).info.run_id
        fields = flat(logged.config).items()
        params = [Param(known(name), str(value)[:6000]) for name, value in fields]
        for first in range(0, len(params), 100):  # as many as one request takes
            client.log_batch(run, params=params[first : first + 100])
    client.log_dict(run, dict(logged.config), "config.json")

    def write(row: int, step: int, values: Values) -> None:
        now, metrics = int(time.time() * 1000), []
        for name, value in values.items():
            if isinstance(value, str):
                client.log_text(run, value, f"{known(name)}/{step:09d}.md")
            else:
                metrics.append(Metric(known(name), value, now, step))
        if metrics:
            client.log_batch(run, metrics=metrics)

    return run, write, lambda: client.set_terminated(run)
