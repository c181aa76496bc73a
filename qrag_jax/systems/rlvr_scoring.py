"""Scores an RLVR run: its model answers the evaluation questions by several weights and retrievers.

The weights are a trained checkpoint, those at the end of imitation if they are kept, and the
untrained ones. What is scored are the files of predictions (`rlvr_predict`) that this writes.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.metrics import prediction_scores, predictions
from qrag_jax.metrics.prediction_scores import ALL
from qrag_jax.metrics.predictions import ScoredEpisode
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.lm_card import ExportedSystem, Fields, Scores
from qrag_jax.systems.rlvr_config import NAME, RlvrConfig
from qrag_jax.systems.rlvr_predict import Player, PredictOptions, open_player
from qrag_jax.systems.saved_token_run import FIRST, IMITATED, Weights
from qrag_jax.systems.scored_ways import ASKED, check_own_questions, of_others

SUMMARY = "summary.json"
# Names of the evaluation that RLVR's README plans, and ours.
_PLANNED = {
    "exact_match": "em",
    "f1": "f1",
    "weighted_em": "weighted_em",
    "weighted_f1": "weighted_f1",
    "retrieval_recall": "recall",
    "combined_reward": "reward",
}
_OF_QUESTIONS = ("questions.", "tasks.")

Played = dict[str, dict[str, list[ScoredEpisode]]]  # by retriever, then by what the weights are


@dataclasses.dataclass(frozen=True)
class PlayOptions:
    """What is scored, and where predictions and scores are written.

    Attributes:
        checkpoint: "best" or "last".
        retrievers: names; (): the run's own.
        samples: number of questions, 0 for all.
        sampled: episodes drawn for each question; 0: one, as `config.eval.greedy` says.
        out: folder; None: `eval` in the run's folder.
        restart: throw partial files away.
    """

    checkpoint: str
    retrievers: tuple[str, ...] = ()
    samples: int = 0
    sampled: int = 0
    out: Path | None = None
    restart: bool = False


def score_language_model(workdir: Path, given: ConfigDict, options: PlayOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary.

    Raises:
        Stopped: a signal came; the same command goes on.
        FeedbackLost: too many episodes fail.
    """
    if given.env.verifiers:
        from qrag_jax.systems.environment_scoring import score_environment

        if options.retrievers:
            raise InputError(
                f"--retrievers={','.join(options.retrievers)} is for questions of our own, and the "
                f"run's environment is {given.env.verifiers!r}; leave it out."
            )
        return score_environment(workdir, given, options)
    given = given.copy_and_resolve_references()
    if not options.out:
        check_own_questions(workdir, given, _OF_QUESTIONS)
    others = bool(of_others(workdir, given, ASKED))
    chose = report_on(given, options.samples, others=others)
    out = options.out or workdir / "eval"
    retrievers = options.retrievers or (given.tools.retriever,)
    if len(set(retrievers)) < len(retrievers):
        raise InputError(f"--retrievers={','.join(retrievers)} names one twice; give each once.")
    files: dict[str, dict[str, str]] = {name: {} for name in retrievers}
    played: Played = {name: {} for name in retrievers}
    notes = []
    with open_player(given, workdir, workdir) as player:
        for name in retrievers:  # refused before anything is played
            player.library(name)
        trained = player.weights(options.checkpoint)
        assert trained is not None
        halves = player.system.inputs.drawn.summary(chose, others=others)
        main = trained.told
        for which in (None, IMITATED, FIRST):
            weights = trained if which is None else player.weights(which)
            if weights is None:
                notes += _not_kept(player)
                continue
            for name in retrievers:
                log = out / weights.name / f"{name}.jsonl"
                _predict(player, weights, log, name, options)
                played[name][weights.told] = predictions.read_scores(log)
                files[name][weights.told] = str(log.relative_to(out))
    settings = {"workdir": str(workdir), **_flags(options, retrievers), "run": given.to_dict()}
    summary = _planned(played[retrievers[0]][main], files[retrievers[0]][main], settings)
    summary["questions"] = halves
    summary["main"] = {"retriever": retrievers[0], "weights": main}
    summary["scores"] = {
        name: {told: prediction_scores.summarised(rows) for told, rows in own.items()}
        for name, own in played.items()
    }
    summary["gains"] = {
        name: {
            told: prediction_scores.gains(own[main], rows)
            for told, rows in own.items()
            if told != main
        }
        for name, own in played.items()
    }
    summary |= {"files": files, "notes": notes}
    write_whole(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    print("\n".join([*_table(summary), halves["line"]]))
    print(f"predictions and summary: {out}")
    return summary


def _predict(
    player: Player, weights: Weights, log: Path, retriever: str, options: PlayOptions
) -> None:
    how = PredictOptions(sampled=options.sampled, restart=options.restart)
    player.predict(weights, log, retriever=retriever, options=how)


def _not_kept(player: Player) -> list[str]:
    """Why there are no scores of the end of imitation; none if there was no such stage."""
    step = player.imitation_ends
    if not step:
        return []
    return [
        f"no checkpoint of the end of imitation, step {step}, is kept (the run has "
        "not come so far, or it was deleted), so its scores are not here"
    ]


def _flags(options: PlayOptions, retrievers: Sequence[str]) -> dict[str, Any]:
    return {
        "checkpoint": options.checkpoint,
        "retrievers": [*retrievers],
        "samples": options.samples,
        "sampled": options.sampled,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _planned(
    episodes: Sequence[ScoredEpisode], file: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The summary as RLVR's README plans it, and the intervals of its metrics.

    A trajectory is named by the file and the line that have it.
    """
    whole = prediction_scores.summarised(episodes)[ALL]
    known = {planned: whole[own] for planned, own in _PLANNED.items() if own in whole}
    results = [
        {
            "id": each.id,
            "draw": each.draw,
            "question": each.question,
            "prediction": each.prediction,
            "truth": [*each.answers],
            "exact_match": each.parts.get("em"),
            "f1": each.parts.get("f1"),
            "retrieval_recall": each.parts.get("recall"),
            "combined_reward": each.reward,
            "n_hops": each.hops,
            "status": each.status,
            "trajectory": {"file": file, "line": each.line},
        }
        for each in episodes
    ]
    return {
        "config": config,
        "metrics": {name: each["mean"] for name, each in known.items()}
        | {"n_hops_avg": whole["hops"]},
        "intervals": known,
        "per_example_results": results,
    }


def _table(summary: Mapping[str, Any]) -> list[str]:
    lines, after = [], []
    for retriever, own in summary["scores"].items():
        for told, scores in own.items():
            cells = prediction_scores.score_lines(scores)
            cells[0][0] = f"{retriever}, {told}"
            lines += cells
            after += [
                f"{retriever}, {told}: {x}" for x in prediction_scores.draws_text(scores[ALL])
            ]
        for told, found in summary["gains"][retriever].items():
            lines.append(prediction_scores.gain_line(f"{retriever}, gain over {told}", found))
    notes = [f"note: {each}" for each in summary["notes"]]
    return [*prediction_scores.table(lines), *after, *notes]


_SHOWN = ("em", "f1", "recall", "citation", "reward")


def _told(fields: Fields) -> str:
    tools, questions = fields["tools"], fields["questions"]
    return (
        f"Its prompt is `config.tools.prompt={tools['prompt']}`, its calls are written as "
        f"`config.tools.form={tools['form']}`, and it was trained on "
        f"`config.questions.train={questions['train']}`."
    )


def _scores(summary: Fields, checkpoint: str) -> Scores:
    return {
        retriever: {name: weights[checkpoint]["all"][name]["mean"] for name in _SHOWN}
        for retriever, weights in summary["scores"].items()
        if checkpoint in weights
    }


RLVR = ExportedSystem(
    name=NAME,
    title="RLVR",
    learned="search with tools",
    read=RlvrConfig.of,
    told=_told,
    scored="retriever",
    scores=_scores,
)
