"""Scores a LeReT run hop by hop, beside all that it should be better than.

Beside the trained weights, asked by the bare prompt, are: the question itself as the query, the
question with the best passage found so far, the weights at the end of each earlier stage, the
untrained ones, the prompts that made the tries by the weights that they were made with, and the
best of these prompts for each question after the last hop, which nobody can know beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.environments.query_writing.few_shot_file import NAME, read_few_shot
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.errors import InputError
from qrag_jax.evaluators.query_scores import logged
from qrag_jax.learners import placement
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics import agent_log, hop_log
from qrag_jax.metrics.score_table import interval_text
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.runtime import determinism
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.compilation import enable_persistent_cache
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.run import log as tell
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import FEW_SHOT, SCRIPT, LeretConfig
from qrag_jax.systems.leret_hops import Rows
from qrag_jax.systems.leret_inputs import CORPUS, fingerprint, load_inputs
from qrag_jax.systems.own_questions import check_own_questions, of_others
from qrag_jax.systems.token_system import EVALUATED

SUMMARY = "summary.json"
QUESTION, WITH_PASSAGE = "question", "question_and_passage"
OF_QUESTIONS = ("questions.", "search.")
_WORDS = 64  # of a query with a passage


@dataclasses.dataclass(frozen=True)
class HopOptions:
    """What is scored, and where logs and scores are written.

    Attributes:
        checkpoint: "best" or "last".
        samples: number of questions, 0 for all.
        out: folder; None: `eval` in the run's folder.
        restart: throw logs away.
    """

    checkpoint: str
    samples: int = 0
    out: Path | None = None
    restart: bool = False


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to write the queries.

    Attributes:
        name: of its log, such as "last-2140".
        told: what people are told of it.
        play: plays the questions; None: the weights are not kept.
    """

    name: str
    told: str
    play: Callable[[], Rows | None]


def score_query_writer(workdir: Path, given: ConfigDict, options: HopOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary.

    Raises:
        InputError: the run, its checkpoint or the questions cannot be used, or a log is of other
            settings.
        Stopped: a signal came; the same command goes on with the ways that are left.
    """
    given = given.copy_and_resolve_references()
    given.eval.samples = options.samples
    out, pool = options.out or workdir / "eval", None
    if not options.out:
        check_own_questions(workdir, given, OF_QUESTIONS)
    elif of_others(workdir, given, OF_QUESTIONS):
        pool = out / CORPUS
    rows: dict[str, list[hop_log.Searched]] = {}
    notes = []
    with _opened(given, workdir, pool) as (system, stop):
        main, ways = _ways(system, workdir, options.checkpoint, stop)
        shown = system.inputs.dev
        asked = {"questions": fingerprint(shown), "corpus": system.inputs.data["corpus"]}
        for way in ways:
            path = out / f"{way.name}.jsonl"
            record = {"way": way.name, **asked, **_settings(given)}
            if options.restart:
                path.unlink(missing_ok=True)
            agent_log.refuse_other(path, record)
            if not path.exists():
                stop.check()
                played = way.play()
                if played is None:
                    notes.append(f"{way.told} is not here: its weights are not kept")
                    continue
                hop_log.write(path, logged(shown, played), record)
            rows[way.told] = hop_log.read(path)
        prompts = {told: rows[told] for told in rows if told.startswith("prompt ")}
        if len(prompts) > 1:
            rows["best of these prompts, by the gold pages"] = _best([*prompts.values()])
    summaries = {told: hop_log.summary(each) for told, each in rows.items()}
    found = {
        "main": main,
        "scores": summaries,
        "gains": {
            told: hop_log.gains(rows[main], each) for told, each in rows.items() if told != main
        },
        "notes": notes,
        "config": given.to_dict(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_whole(out / SUMMARY, json.dumps(found, indent=1) + "\n")
    hops = len(rows[main][0].hops)
    print("\n".join(hop_log.table(summaries, hops)))
    for told, gain in found["gains"].items():
        print(f"{main} - {told}, all gold: {interval_text(gain[f'hop{hops}/all_gold'], sign=True)}")
    for note in notes:
        print(f"note: {note}")
    print(f"logs and summary: {out}")
    return found


def _ways(system: Leret, workdir: Path, checkpoint: str, stop: StopSignal) -> tuple[str, list[Way]]:
    """All ways; and what the first of them, the run's own, is called."""
    shown, hops, plan = system.inputs.dev, system.hops, system.config.plan
    template = placement.shapes_on(system.inputs.model.trained, system.param_shardings)
    checkpoints = Checkpoints(workdir, read_only=True)
    params, step = checkpoints.restore_params(checkpoint, template)

    def by(weights: Callable[[], Any | None], variant: int = 0) -> Callable[[], Rows | None]:
        # Weights are read when they play, and then dropped: a large model has no room for all.
        def play() -> Rows | None:
            if (params := weights()) is None:
                return None
            by_device = system.by_device(params, stop, greedy=system.config.eval.greedy)
            return hops.by_model(shown, by_device, EVALUATED, variant)

        return play

    def after(step: int) -> Callable[[], Any | None]:
        return lambda: checkpoints.restore_params_of(step, template)

    def first() -> Any:
        return placement.place(system.inputs.model.trained, system.param_shardings)

    main = f"{checkpoint} checkpoint of step {step}"
    ways = [Way(f"{checkpoint}-{step}", main, by(lambda: params))]
    for stage in plan:
        end = stage.first + stage.steps
        if end < step:
            of = f" of iteration {stage.iteration}" if stage.iteration else ""
            told = f"after {stage.kind}{of}, step {end}"
            ways.append(Way(f"stage-{end}", told, by(after(end))))
    ways.append(Way("untrained", "untrained", by(first)))
    if _has_prompts(system):
        prompt = system.prompt(None)
        asked_by = after(plan[0].steps) if plan[0].kind == SCRIPT else first
        ways += [
            Way(
                f"prompt-{prompt.names[variant]}",
                f"prompt {prompt.names[variant]}, by what made the first tries",
                by(asked_by, variant),
            )
            for variant in system.variants
            if variant
        ]
    ways.append(Way(QUESTION, "the question", lambda: hops.by_rule(shown, _question)))
    told = "the question and the first passage"
    ways.append(Way(WITH_PASSAGE, told, lambda: hops.by_rule(shown, _with_passage)))
    return main, ways


def _has_prompts(system: Leret) -> bool:
    """Whether all ways to ask are known; those with examples are made in training."""
    path = system.workdir / NAME
    if system.config.tries.ways != FEW_SHOT:
        return True
    template = system.inputs.agent.prompt.prompt.fingerprint
    return path.exists() and bool(read_few_shot(path, template).kept)


def _question(state: QueryState) -> str:
    return one_line(state.question)


def _with_passage(state: QueryState) -> str:
    passage = state.pool[0].text if state.pool else ""
    return " ".join(f"{state.question} {passage.lstrip('# ')}".split()[:_WORDS])


def _best(ways: list[list[hop_log.Searched]]) -> list[hop_log.Searched]:
    """For each question the way that found most, by average precision after the last hop."""
    return [
        max(each, key=lambda row: row.hops[-1].scores["ap"]) for each in zip(*ways, strict=True)
    ]


def _settings(given: ConfigDict) -> dict[str, Any]:
    """Fields that the play of given weights depends on."""
    every = json.loads(json.dumps(given.to_dict()))
    of_play = ("model", "search", "writing", "sampling", "seed")
    return {name: every[name] for name in of_play} | {"greedy": every["eval"]["greedy"]}


@contextlib.contextmanager
def _opened(
    given: ConfigDict, workdir: Path, pool: Path | None
) -> Iterator[tuple[Leret, StopSignal]]:
    config = LeretConfig.of(given)
    if not config.model.path and not (workdir / FOLDER).exists():
        raise InputError(f"{workdir} holds no model; --workdir must be a run that was trained.")
    if told := determinism.ask(config.runtime.deterministic):
        tell(told)
    enable_persistent_cache(workdir / "compilation_cache")
    mesh = make_mesh(config.runtime.mesh)
    with StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, trains=False, pool=pool)
        yield Leret(config, mesh, inputs, workdir), stop
