"""The one way to score: ways to play what is asked → logs that go on → summary and table.

A system gives its `Way`s, the `Questions` that they play, and how rows become scores.

What takes a `StopSignal` raises `Stopped` when a signal came; the same command then goes on with
its log (`resumable`). What plays raises `FeedbackLost` when too many episodes fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from jax.sharding import Mesh
from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax import systems
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.learners.state import encoder_key, shapes_on
from qrag_jax.metrics.row_log import RowLog, begin
from qrag_jax.runtime import checkpoints, whole_files
from qrag_jax.runtime.config_fields import CONFIG_NAME, flat, read_fields
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.run import log
from qrag_jax.systems import token_config, training
from qrag_jax.systems.config import ALL, REPORTED, Drawn

SUMMARY = "summary.json"
NOT_KEPT = "its weights are not kept"
# Fields that change no row of a retrieval log. A name that ends with a dot is a whole section; * is
# any name.
FREE_FIELDS = (
    # Where and how fast the rows are computed.
    *("profile", "runtime.", "data.cache", "data.workers", "eval.batch_size"),
    # Read only by training: the record holds the trained weights instead.
    *("seed", "train.", "eval.samples", "eval.best_by"),
    *("data.limit", "data.mixture", "data.sources.*.weight"),
    # Requests to a language model and its rewards: evaluation asks no model.
    *("llm.", "reward.prompt", "reward.scale", "reward.staleness", "reward.max_failure_share"),
)

Logs = Sequence[tuple[str, Path]]  # what played, and the log
Asked = TypeVar("Asked")
Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    checkpoint: str  # "best" or "last"
    samples: int = 0  # number of questions or queries, 0 for all
    sampled: int = 0  # episodes drawn for a question, for pass@k and vote@k, besides the usual
    retrievers: tuple[str, ...] = ()  # of RLVR's tools; (): the run's own
    out: Path | None = None  # folder; None: `eval` in the run's folder
    restart: bool = False  # throw partial logs away
    as_training: bool = False  # all at once, by the draws of its evaluations, not part by part


def resumable(play: Callable[[], object], kept: str) -> int:
    """Plays or scores; returns the exit status of the command."""
    try:
        play()
    except Stopped as stopped:
        print(f"{stopped}: stopped, {kept} is kept; give the same command to go on.")
        return 128 + signal.Signals[str(stopped)]
    except FeedbackLost as error:
        reason = str(error).rstrip(".")
        print(f"error: {reason}. Give the same command to go on.", file=sys.stderr)
        return 1
    return 0


def is_free(name: str, free: tuple[str, ...] = FREE_FIELDS) -> bool:
    """Whether `name`, a field with its sections, is one of `free` or below one of its sections."""
    return any(fnmatchcase(name, f"{field}*" if field.endswith(".") else field) for field in free)


def of_others(workdir: Path, raw: ConfigDict, parts: Sequence[str]) -> list[str]:
    """The fields, whose names begin with one of `parts`, that are not as in the run's config."""
    old, new = flat(read_fields(workdir / CONFIG_NAME)), flat(raw.to_dict())
    return [
        f"config.{name}"
        for name in sorted(old.keys() | new.keys())
        if name.startswith(tuple(parts))
        and old.get(name) != new.get(name)
        # A free field that one side lacks is the weight of a source that only the other reads.
        and not (is_free(name) and name in old and name in new)
    ]


def are_others(workdir: Path, raw: ConfigDict, parts: Sequence[str], out: Path | None) -> bool:
    """Whether other questions than the run's are asked, which need a place of their own."""
    differing = of_others(workdir, raw, parts)
    if differing and out is None:
        raise InputError(
            f"what is asked is not the run's own (not as in its config: {', '.join(differing)}); "
            f"give --out for others, since the usual place in {workdir} is for its own."
        )
    return bool(differing)


def begin_scoring(
    workdir: Path, raw: ConfigDict, options: ScoreOptions, kind: Any
) -> tuple[ConfigDict, Path, Callable[[Drawn], dict[str, Any]]]:
    """Sets a run's config to the questions that its scores are of; `kind`: its system.

    Gives the config, the folder of logs and summary, and what the summary says of the questions.
    """
    raw = raw.copy_and_resolve_references()
    are_others(workdir, raw, kind.OF_QUESTIONS, options.out)
    others = bool(of_others(workdir, raw, kind.ASKED))
    chose, raw.eval.samples = int(raw.eval.samples), options.samples
    if raw.eval.get("part", ALL) != ALL:
        raw.eval.part = ALL if others else REPORTED
    out = options.out or workdir / "eval"
    return raw, out, lambda drawn: drawn.summary(chose, others=others)


def compared(
    rows: Mapping[str, Row],
    main: str,
    summarise: Callable[[Row], Any],
    gains: Callable[[Row, Row], Any],
) -> dict[str, Any]:
    """`scores` of each way, and `gains`, the paired differences of the main one to each other."""
    return {
        "main": main,
        "scores": {label: summarise(way) for label, way in rows.items()},
        "gains": {label: gains(rows[main], way) for label, way in rows.items() if label != main},
    }


def end_scoring(
    out: Path, raw: ConfigDict, summary: Mapping[str, Any], lines: Iterable[str]
) -> dict[str, Any]:
    """Writes a summary with its config, and prints its table; returns the summary."""
    whole = {"config": raw.to_dict(), **summary}
    whole_files.write_json(out / SUMMARY, whole)
    print("\n".join([*lines, *(f"note: {note}" for note in summary.get("notes", ()))]))
    print(f"logs and summary: {out}")
    return whole


class Way(NamedTuple):
    name: str  # of its log in the folder of all, such as "last-2140"
    label: str  # shown in tables and logs
    # (a part of what is asked, number of its first) → rows, `draws` of each asked
    play: Callable[[Sequence[Any], int], Sequence[Any]]
    record: Mapping[str, Any]  # what its rows depend on
    missing: str = ""  # why it cannot play; "": it can
    size: int = 0  # asked of a part; 0: as for the others


@dataclasses.dataclass(frozen=True)
class Questions(Generic[Asked, Row]):
    """What is asked part by part into logs, so that a play broken off goes on.

    The draws of a row depend on the numbers of its part and of its place there alone. What is
    computed may depend on all of a part, so a log goes on behind its last whole part.
    """

    rows: RowLog[Row]  # writes and reads the logs
    asked: Sequence[Asked]  # all of it
    size: int = 0  # asked of a part, 0: all
    draws: int = 1  # rows of each asked

    def into(self, log: Path, way: Way, stop: StopSignal, *, restart: bool) -> str:
        """Plays all that the log lacks; returns "", or why the way is not here."""
        count = len(self.asked)
        size = way.size or self.size or count
        with whole_files.log_locks(log):
            if log.exists():
                begin(log, way.record, restart=restart)
            rows = self.rows.resume(log, size * self.draws, count * self.draws)
            if (done := rows // self.draws) == count:
                return ""
            if way.missing:
                return way.missing
            begin(log, way.record)
            with tqdm(total=count, initial=done, unit="question", desc=log.stem) as bar:
                while done < count:
                    stop.check()
                    part = self.asked[done : done + size]
                    self.rows.append(log, way.play(part, done))
                    done += len(part)
                    bar.update(len(part))
        return ""

    def played(
        self, folder: Path, ways: Iterable[Way], stop: StopSignal, *, restart: bool
    ) -> tuple[list[tuple[str, Path]], list[str]]:
        """The label and the log of each way; and why ways are not here, a sentence each."""
        logs, notes = list[tuple[str, Path]](), list[str]()
        for way in ways:
            stop.check()
            log(f"{way.label}: {(path := folder / f'{way.name}.jsonl')}")  # one may take minutes
            if why := self.into(path, way, stop, restart=restart):
                notes.append(f"{way.label} is not here: {why}")
            else:
                logs.append((way.label, path))
        return logs, notes


# ---------------------------------------------------------------- a run

# Of a run's weights: its checkpoints, what training began with, what imitation ended with.
BEST, LAST, FIRST, IMITATED = CHECKPOINTS = ("best", "last", "first", "sft")


def mesh_of_run(
    config: Any, workdir: Path | None, mesh_of: Callable[[tuple[int, int, int]], Mesh] = make_mesh
) -> Mesh:
    """The mesh on which the model of a run plays, or without one (None) the config's own model."""
    what = "model" if hasattr(config, "model") else "encoder"  # its folder in the run's
    path = config.model.path if what == "model" else ""
    if workdir and not path and not (workdir / what / "config.json").exists():
        raise InputError(f"{workdir} holds no {what}; --workdir must be a run that was trained.")
    return config.mesh(mesh_of)


def saved_params(workdir: Path, which: str, trained: Any, shardings: Any) -> tuple[Any, int]:
    """The parameters of a run's checkpoint "best" or "last", which are as `trained`; their step."""
    template = shapes_on(trained, shardings)
    return checkpoints.Checkpoints(workdir, read_only=True).restore_params(which, template)


class Weights(NamedTuple):
    name: str  # of what they write, such as "best-120"
    label: str  # shown in tables and logs
    step: int
    params: Any  # a text says why they are not here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predictor(Questions[Any, Any]):
    """Questions that the model of one run plays."""

    system: Any
    stop: StopSignal
    raw: ConfigDict
    options: ScoreOptions
    play: Any = None  # (parameters, a part, number of its first) → its rows; None: each way has one
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what all rows depend on
    name: str = ""  # of what searches, in names of files
    steps: dict[str, int] = dataclasses.field(default_factory=dict)  # of checkpoints that were read

    def weights(self, which: str) -> Weights:
        if which == FIRST:
            return Weights("untrained", "untrained", 0, self.system.untrained)
        if which != IMITATED:
            params, step = self._checkpoints.restore_params(which, self._template)
            self.steps[which] = step
            return Weights(f"{which}-{step}", f"{which} checkpoint of step {step}", step, params)
        ends = {plan.kind: plan for plan in reversed(self._earlier)}
        imitated = ends.get(getattr(self.system.config, "IMITATION", ""))
        weights = self.after(imitated) if imitated else None
        if weights is None or isinstance(weights.params, str):
            raise InputError(f"{self.system.workdir} lacks imitated weights; change --checkpoint.")
        return weights

    def after(self, plan: token_config.StagePlan) -> Weights:
        params = self._checkpoints.restore_params_of(plan.end, self._template)
        kept = NOT_KEPT if params is None else params
        return Weights(f"{plan.kind}-{plan.end}", f"{plan.label}, step {plan.end}", plan.end, kept)

    @property
    def _earlier(self) -> Sequence[token_config.StagePlan]:
        """All stages but the last, whose end is the run's."""
        return getattr(self.system.config, "plan", ())[:-1]

    def way(
        self, weights: Weights, name: str = "", label: str = "", play: Any = None, **record: Any
    ) -> Way:
        """The play of these weights into the log of this name."""
        params = weights.params
        missing = params if isinstance(params, str) else ""
        record |= {"checkpoint": weights.label}
        record["weights"] = "" if missing else encoder_key(params, {})
        bound = partial(play or self.play, params)
        name, label = name or weights.name, label or weights.label
        return Way(name, label, bound, {**self.record, **record}, missing)

    def ways(self, checkpoint: str) -> Iterator[Weights]:
        """The weights that are scored: a checkpoint's, those of earlier stages, the untrained.

        Each are read when they are due, and may be dropped then.
        """
        step = (weights := self.weights(checkpoint)).step
        yield weights
        del weights
        yield from (self.after(plan) for plan in self._earlier if plan.end < step)
        yield self.weights(FIRST)

    @cached_property
    def _checkpoints(self) -> checkpoints.Checkpoints:
        return checkpoints.Checkpoints(self.system.workdir, read_only=True)

    @cached_property
    def _template(self) -> Any:
        return shapes_on(self.system.inputs.model.trained, self.system.param_shardings)


@contextlib.contextmanager
def open_predictor(
    kind: Any, raw: ConfigDict, workdir: Path | None, options: ScoreOptions, **asked: Any
) -> Iterator[Predictor]:
    """Opens the model of a run, and the questions to ask.

    Args:
        kind: the class of its system; see `score_run`.
        workdir: the run's folder; None: the config's own model, untrained.
        asked: what is asked in place of the run's own, as the system's `load_inputs` takes it.
            `folder`: where the model is that no run has, or is made.
    """
    kind, folder = kind.played_by(raw), asked.pop("folder", workdir)
    mesh = mesh_of_run(config := kind.SETTINGS.of(raw), workdir)
    with StopSignal() as stop, contextlib.ExitStack() as stack:
        parts = kind.parts(training.Opening(config, folder, mesh, stack, stop=stop, asked=asked))
        system = kind(config=config, mesh=mesh, workdir=folder, **parts)
        stack.callback(system.close)
        more = system.plays(raw, options, stop)
        yield Predictor(system=system, stop=stop, raw=raw, options=options, **more)


def score_run(workdir: Path, raw: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores a run of any system; returns the summary.

    A system of the package has three methods for this besides those of `MeshSystem`: `plays` gives
    the fields of a `Predictor`, `ways` all that is played with it, and `summary` the scores of the
    logs and their table. Another one is scored as its training does it.
    """
    if not hasattr(kind := systems.kind(raw), "OF_QUESTIONS"):
        return _scored_by_itself(workdir, raw, options)
    raw, out, halves = begin_scoring(workdir, raw, options, kind)
    asked = {}
    if kind.SEARCH and of_others(workdir, raw, kind.OF_QUESTIONS):
        asked["search"] = out / kind.SEARCH
    options = dataclasses.replace(options, as_training=True)
    opened = getattr(kind, "open_predictor", partial(open_predictor, kind))
    with opened(raw, workdir, options, **asked) as predictor:
        system, ways = predictor.system, predictor.system.ways(predictor)
        logs, notes = predictor.played(out, ways, predictor.stop, restart=options.restart)
    summary, lines = system.summary(predictor, logs)
    step = predictor.steps[options.checkpoint]
    about: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step, **summary}
    about["notes"] = [*dict.fromkeys([*notes, *summary.get("notes", ())])]
    if "part" in raw.eval:
        about["questions"] = halves(system.inputs.drawn)
        lines.append(about["questions"]["line"])
    return end_scoring(out, raw, about, lines)


def _scored_by_itself(workdir: Path, raw: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    if options.samples:
        raise InputError(f"--samples is not for runs of {raw.system}; leave it out.")
    opened = systems.saved_system(workdir, raw, options.checkpoint)
    with opened as (system, state, step), StopSignal() as stop:
        evaluation = system.evaluate(state, step, stop)
    summary = {"checkpoint": options.checkpoint, "step": step, "scores": evaluation.scores}
    return end_scoring(options.out or workdir / "eval", raw, summary, [evaluation.line])
