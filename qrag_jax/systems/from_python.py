"""Training and scoring from a program or a notebook, on the same run folders as the commands.

    from qrag_jax import train

    run = train("configs/own.py:minilm", "runs/mine", data=questions, dev=others, reward=score)
    print(run.evaluate()["scores"]["trained"])
    hits = run.retriever().search("…")

`qrag train` with the same fields continues a run that was begun here, and the other way round.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.runtime.config_fields import CONFIG_NAME, has_begun
from qrag_jax.runtime.whole_files import write_whole, writing
from qrag_jax.runtime.writers import METRICS_NAME, read_metrics
from qrag_jax.systems import run_flags
from qrag_jax.systems.retriever import LoadSettings, Retriever

RECORDS = "records"  # in the run's folder: data that were given in memory

Records = Iterable[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The folder of a run."""

    workdir: Path

    @property
    def curve(self) -> list[dict[str, float]]:
        """The run's metrics, a row for each logged step: name → value, with its `step`."""
        return read_metrics(self.workdir / METRICS_NAME)

    def evaluate(self, **how: Any) -> dict[str, Any]:
        """See `evaluate`."""
        return evaluate(self.workdir, **how)

    def retriever(self, checkpoint: str = "") -> Retriever:
        """The trained retriever (Q-RAG); "": of the best checkpoint."""
        return Retriever.load(self.workdir, LoadSettings(checkpoint=checkpoint))


def train(
    config: str,
    workdir: str | Path,
    *,
    data: Records | None = None,
    dev: Records | None = None,
    reward: Callable[..., float] | None = None,
    **fields: Any,
) -> TrainedRun:
    """Trains, or resumes the run in `workdir`.

    Args:
        config: an experiment, FILE or FILE:VARIANT, such as configs/own.py:minilm.
        data: questions to train on, in the form of a line of `train.jsonl`
            (docs/own_data.md); None: `data.path` names them.
        dev: questions to score with, in the same form; they come with `data`.
        reward: a function of a file of Python, as `config.reward.path` names it.
        fields: of the config by their names with dots: `**{"train.steps": 100}`.

    Raises:
        KeyboardInterrupt: a signal stopped the training; the run is saved.
    """
    folder = Path(workdir)
    if data is not None or dev is not None:
        if data is None or dev is None:
            raise InputError("train: data and dev come together; give both, or data.path.")
        fields = {"data.path": _written(folder / RECORDS, data, dev), **fields}
    if reward is not None:
        fields = {"reward.path": _source(reward), **fields}
    from qrag_jax.systems import training  # which imports jax

    experiment = run_flags.experiment_of([f"--config={config}", *_words(fields)])
    if (status := training.train(experiment, folder)) > 128:
        raise KeyboardInterrupt(signal.Signals(status - 128).name)
    return TrainedRun(folder)


def evaluate(
    workdir: str | Path,
    *,
    checkpoint: str = "best",
    samples: int = 0,
    out: str | Path | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Scores a run as `qrag evaluate` does, and returns what it writes to `summary.json`.

    Args:
        checkpoint: "best" or "last".
        samples: questions to score; 0: all.
        out: folder of logs and summary; None: `eval` in the run's folder.
        fields: of the run's config that differ, by their names with dots.
    """
    from qrag_jax.systems.config import load_config
    from qrag_jax.systems.scoring import ScoreOptions, score_run

    folder = Path(workdir)
    config = load_config(folder / CONFIG_NAME)
    if config.system not in systems.SYSTEMS:
        raise InputError(f"{folder} is of {config.system}; use qrag evaluate --system=FILE.")
    config = run_flags.with_fields(config, _words(fields))
    options = ScoreOptions(checkpoint, samples, out=Path(out) if out else None)
    with writing(options.out or folder / "eval", "out"):
        return score_run(folder, config, options)


def _words(fields: Mapping[str, Any]) -> list[str]:
    """Fields as the command line gives them, so that both are read in one way."""
    return [f"--config.{name}={value}" for name, value in fields.items()]


def _written(folder: Path, data: Records, dev: Records) -> str:
    """Writes records as files, which a run that has begun keeps as they are."""
    for name, records in (("train", data), ("dev", dev)):
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        path = folder / f"{name}.jsonl"
        if has_begun(folder.parent) and (not path.exists() or path.read_text("utf-8") != lines):
            raise InputError(f"{folder.parent} has other questions; give another workdir.")
        with writing(folder, "workdir"):
            write_whole(path, lines)
    return str(folder)


def _source(reward: Callable[..., float]) -> str:
    """FILE:FUNCTION of a function, which lets a command resume the run."""
    file, name = inspect.getsourcefile(reward), getattr(reward, "__qualname__", "")
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise InputError(
            f"reward {name or reward!r} is in no file; put the function at the top of a file of "
            "Python, and import it from there, so that a resumed run finds it."
        )
    return f"{file}:{name}"
