"""Scores a LeReT run hop by hop, beside all that it should be better than.

Beside the trained weights, asked by the bare prompt, are: the question itself as the query, the
question with the best passage found so far, the weights at the end of each earlier stage, the
untrained ones, and the prompts that made the tries by the weights that they were made with.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.environments.query_writing.few_shot_file import NAME as EXAMPLES
from qrag_jax.environments.query_writing.few_shot_file import read_few_shot
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.evaluators.query_scores import logged
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics import hop_log
from qrag_jax.metrics.bootstrap import interval_text
from qrag_jax.metrics.hop_log import SHOWN, Searched
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import FEW_SHOT, NAME, SCRIPT, LeretConfig
from qrag_jax.systems.leret_inputs import CORPUS, OF_QUESTIONS, fingerprint
from qrag_jax.systems.leret_predict import open_hop_predictor
from qrag_jax.systems.lm_card import ExportedSystem, Fields, Scores
from qrag_jax.systems.saved_token_run import SavedWeights, digest_of_weights
from qrag_jax.systems.scored_ways import (
    ASKED,
    NOT_KEPT,
    Way,
    WayLogs,
    WayOptions,
    are_others,
    of_others,
)
from qrag_jax.systems.token_system import EVALUATED

SUMMARY = "summary.json"
QUESTION, WITH_PASSAGE = "question", "question_and_passage"
_WORDS = 64  # of a query with a passage

Played = list[Searched] | str  # see `Way.play`


def score_query_writer(workdir: Path, given: ConfigDict, options: WayOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary.

    Raises:
        Stopped: a signal came; the same command goes on with the ways that are left.
    """
    given = given.copy_and_resolve_references()
    new = bool(of_others(workdir, given, ASKED))
    chose = report_on(given, options.samples, others=new)
    out = options.out or workdir / "eval"
    others = are_others(workdir, given, OF_QUESTIONS, out=options.out)
    pool = out / CORPUS if others else None
    with open_hop_predictor(given, workdir, pool=pool) as predictor:
        system, stop = predictor.system, predictor.stop
        ways = _ways(system, options.checkpoint, stop)
        halves = system.inputs.drawn.summary(chose, others=new)
        of_all = {"questions": fingerprint(system.inputs.dev), **_settings(given)}
        of_all["data"] = {name: system.inputs.data[name] for name in ("model", "prompt", "corpus")}
        logs = WayLogs(
            out,
            hop_log.LOG,
            read=lambda path, way: hop_log.read(path),
            record=lambda way: {"way": way.name, "by": way.by, **of_all},
        )
        rows, notes = logs.played(ways, stop, restart=options.restart)
    main = ways[0].told
    summaries = {told: hop_log.summary(each) for told, each in rows.items()}
    found = {
        "main": main,
        "questions": halves,
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
    for told, gain in filter(lambda each: each[1], found["gains"].items()):
        print(f"{main} - {told}, all gold: {interval_text(gain[f'hop{hops}/all_gold'], sign=True)}")
    print(halves["line"])
    for note in notes:
        print(f"note: {note}")
    print(f"logs and summary: {out}")
    return found


def _ways(system: Leret, checkpoint: str, stop: StopSignal) -> list[Way[Searched]]:
    """All ways, the run's own first."""
    shown, hops, plan = system.inputs.dev, system.hops, system.config.plan
    saved = SavedWeights(system)
    own = saved.checkpoint(checkpoint)

    def by(weights: Callable[[], Any | None], variant: int = 0) -> Callable[[], Played]:
        # Weights are read when they play, and then dropped: a large model has no room for all.
        def play() -> Played:
            if (params := weights()) is None:
                return NOT_KEPT
            by_device = system.by_device(params, stop, greedy=system.config.eval.greedy)
            return logged(shown, hops.by_model(shown, by_device, EVALUATED, variant))

        return play

    def by_rule(write: Callable[[QueryState], str]) -> Callable[[], Played]:
        return lambda: logged(shown, hops.by_rule(shown, write))

    def first() -> Any:
        return system.untrained

    ways = [Way(own.name, own.told, by(lambda: own.params), by=digest_of_weights(own.params))]
    for stage in plan:
        end = stage.first + stage.steps
        if end < own.step:
            of = f" of iteration {stage.iteration}" if stage.iteration else ""
            told = f"after {stage.kind}{of}, step {end}"
            ways.append(Way(f"stage-{end}", told, by(partial(saved.after, end))))
    ways.append(Way("untrained", "untrained", by(first)))
    if _has_prompts(system):
        prompt = system.prompt(None)
        asked_by = partial(saved.after, plan[0].steps) if plan[0].kind == SCRIPT else first
        ways += [
            Way(
                f"prompt-{prompt.names[variant]}",
                f"prompt {prompt.names[variant]}, by what made the first tries",
                by(asked_by, variant),
                by=hashlib.sha256(repr(prompt.variants[variant - 1]).encode()).hexdigest()[:16],
            )
            for variant in system.variants
            if variant
        ]
    told = "the question and the first passage"
    return [
        *ways,
        Way(QUESTION, "the question", by_rule(_question)),
        Way(WITH_PASSAGE, told, by_rule(_with_passage)),
    ]


def _has_prompts(system: Leret) -> bool:
    """Whether all ways to ask are known; those with examples are made in training."""
    path = system.workdir / EXAMPLES
    if system.config.tries.ways != FEW_SHOT:
        return True
    template = system.inputs.agent.prompt.prompt.fingerprint
    return path.exists() and bool(read_few_shot(path, template).kept)


def _question(state: QueryState) -> str:
    return one_line(state.question)


def _with_passage(state: QueryState) -> str:
    passage = state.pool[0].text if state.pool else ""
    return " ".join(f"{state.question} {passage.lstrip('# ')}".split()[:_WORDS])


def _settings(given: ConfigDict) -> dict[str, Any]:
    """Fields that the play of given weights depends on."""
    every = json.loads(json.dumps(given.to_dict()))
    of_play = ("model", "search", "writing", "sampling", "reward", "seed")
    return {name: every[name] for name in of_play} | {"greedy": every["eval"]["greedy"]}


def _told(fields: Fields) -> str:
    writing, questions = fields["writing"], fields["questions"]
    words = writing["passage_words"]
    cut = f"the first {words} words" if words else "all"
    return (
        f"Its prompt is `config.writing.prompt={writing['prompt']}`, without examples or marks, "
        f"and shows {cut} of each passage found so far. It was trained on "
        f"`config.questions.train={questions['train']}`, by {writing['hops']} queries of "
        f"{writing['k']} passages each."
    )


def _scores(summary: Fields, checkpoint: str) -> Scores:
    """Of the pool after the last hop."""
    scores, last = summary["scores"], summary["config"]["writing"]["hops"]
    if checkpoint not in scores:
        return {}
    own = scores[checkpoint]
    row = f"after hop {last}, {own['questions']} questions"
    return {row: {name: own[f"hop{last}/{name}"]["mean"] for name in SHOWN}}


LERET = ExportedSystem(
    name=NAME,
    title="LeReT",
    learned="write search queries, one at each hop",
    read=LeretConfig.of,
    told=_told,
    scored="passages found",
    scores=_scores,
)
