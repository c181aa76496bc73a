"""Scores an RLVR run: its model answers the evaluation questions by several weights and retrievers.

The weights are a trained checkpoint, those at the end of imitation if they are kept, and the
untrained ones. What is scored are the files of predictions that this writes: every episode, token
by token, whose draws depend on the numbers of its question and of its draw alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.environments.tools.episode import ToolTask
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.metrics import prediction_scores, predictions
from qrag_jax.metrics.prediction_scores import ALL
from qrag_jax.metrics.predictions import Prediction, ScoredEpisode
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.rollouts.schedule import draw_keys
from qrag_jax.rollouts.token_episodes import Library, TokenStart
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.lm_card import ExportedSystem, Fields, Scores
from qrag_jax.systems.rlvr import Rlvr, TurnTexts, prediction_of
from qrag_jax.systems.rlvr_config import GRPO, NAME, SFT, RlvrConfig
from qrag_jax.systems.rlvr_inputs import fingerprint, load_inputs, open_library
from qrag_jax.systems.saved_token_run import FIRST, IMITATED, SavedWeights, Weights, mesh_of_run
from qrag_jax.systems.scoring import (
    ASKED,
    PlayedParts,
    ScoreOptions,
    are_others,
    of_others,
    write_summary,
)

_PREDICTED = 2**31 - 4  # in place of a step's number: no step has it, and no evaluation
# Sections of the config that episodes of given weights do not depend on. The questions have a
# digest of their own.
_OF_TRAINING = (
    *("train", "optimizer", "runtime", "profile", "demonstrations"),
    *("sft", "grpo", "stages", "eval", "questions", "llm"),
)
PREDICTIONS = RowLog(Prediction, "give --restart to throw the file away", ascii=True)
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


def score_language_model(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    if given.env.verifiers:
        from qrag_jax.systems.environment_scoring import score_environment

        if options.retrievers:
            raise InputError(
                f"--retrievers={','.join(options.retrievers)} is for questions of our own, and the "
                f"run's environment is {given.env.verifiers!r}; leave it out."
            )
        return score_environment(workdir, given, options)
    given = given.copy_and_resolve_references()
    are_others(workdir, given, _OF_QUESTIONS, options.out)
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
                player.predict(weights, log, name, options.sampled, restart=options.restart)
                played[name][weights.told] = predictions.read_scores(log)
                files[name][weights.told] = str(log.relative_to(out))
    settings = {
        "workdir": str(workdir),
        "checkpoint": options.checkpoint,
        "retrievers": [*retrievers],
        "samples": options.samples,
        "sampled": options.sampled,
        "run": given.to_dict(),
    }
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
    summary = write_summary(out, given, summary | {"files": files, "notes": notes})
    print("\n".join([*_table(summary), halves["line"]]))
    print(f"predictions and summary: {out}")
    return summary


def _not_kept(player: Player) -> list[str]:
    """Why there are no scores of the end of imitation; none if there was no such stage."""
    step = player.imitation_ends
    if not step:
        return []
    return [
        f"no checkpoint of the end of imitation, step {step}, is kept (the run has "
        "not come so far, or it was deleted), so its scores are not here"
    ]


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


def played_config(given: ConfigDict) -> dict[str, Any]:
    """The sections of a config that episodes of given weights depend on, as JSON has them."""
    every = given.to_dict().items()
    return json.loads(json.dumps({name: each for name, each in every if name not in _OF_TRAINING}))


@dataclasses.dataclass(frozen=True)
class Player:
    """Predicts with the model of one run.

    Attributes:
        given: the config, with the questions that are asked.
        system: the run's.
        workdir: the run's folder; None: there is no run, and the model is untrained.
        stop: looked at while episodes are played.
        libraries: what the tools read, by the retriever's name.
    """

    given: ConfigDict
    system: Rlvr
    workdir: Path | None
    stop: StopSignal
    libraries: dict[str, Library]

    def weights(self, which: str) -> Weights | None:
        """The weights of one of `CHECKPOINTS`; see `SavedWeights.named`."""
        which = which if self.workdir else FIRST
        return SavedWeights(self.system).named(which, self.imitation_ends, "after imitation")

    @property
    def imitation_ends(self) -> int:
        """The step at which a stage of rewards takes over from one of imitation; 0: none does."""
        both = {SFT, GRPO} <= set(self.system.config.stages)
        return self.system.config.sft_steps if both else 0

    def library(self, retriever: str) -> Library:
        """What the tools read with a retriever; it is made once."""
        if retriever not in self.libraries:
            config = self.system.config
            tools = dataclasses.replace(config.tools, retriever=retriever)
            other = dataclasses.replace(config, tools=tools)
            self.libraries[retriever] = open_library(other, self.system.mesh)
        return self.libraries[retriever]

    def predict(
        self,
        weights: Weights,
        log: Path,
        retriever: str,
        sampled: int = 0,
        *,
        restart: bool = False,
    ) -> None:
        """Plays all questions that the file lacks; see `PlayedParts`.

        Args:
            log: the file, `….jsonl`.
            retriever: what the tool that searches uses.
            sampled: episodes drawn for each question; 0: one, as `config.eval.greedy` says.
            restart: throw the file away instead of going on with it.
        """
        system, library, draws = self.system, self.library(retriever), sampled or 1
        config, texts = system.config, TurnTexts(system.inputs.speech)
        greedy = not sampled and config.eval.greedy

        def play(tasks: Sequence[ToolTask], first: int) -> list[Prediction]:
            keys = keys_of(config.seed, first, len(tasks), draws)
            starts = [
                TokenStart(task, key) for task, own in zip(tasks, keys, strict=True) for key in own
            ]
            episodes = system.player.on_device(
                weights.params, starts, self.stop, greedy=greedy, library=library
            )
            rows = []
            for place, (start, episode) in enumerate(zip(starts, episodes, strict=True)):
                number, draw = first + place // draws, place % draws
                trajectory = system.trajectory(episode, number, draw, start.task)
                rows.append(prediction_of(start.task, trajectory, texts))
            return rows

        parts = PlayedParts(
            rows=PREDICTIONS,
            asked=system.inputs.dev,
            # As many episodes side by side as in training, whose memory is known to suffice.
            size=max(1, config.train.batch_size * config.grpo.members // draws),
            play=play,
            is_of=lambda row, task: row.id == task.id,
            names=("question", "questions"),
            draws=draws,
        )
        record = self._record(weights, retriever, sampled, greedy=greedy)
        parts.into(log, record, self.stop, restart=restart)

    def _record(
        self, weights: Weights, retriever: str, sampled: int, *, greedy: bool
    ) -> dict[str, Any]:
        """All that the episodes depend on."""
        inputs, config = self.system.inputs, played_config(self.given)
        config["tools"]["retriever"] = retriever
        return {
            "kind": predictions.KIND,
            "checkpoint": weights.told,
            "retriever": retriever,
            "questions": len(inputs.dev),
            "sampled": sampled,
            "greedy": greedy,
            "data": {**inputs.data, "questions": fingerprint(inputs.dev)},
            "weights": encoder_key(weights.params, {}),
            "rewards": {**self.system.provenance},
            "config": config,
        }


@contextlib.contextmanager
def open_player(given: ConfigDict, workdir: Path | None, folder: Path) -> Iterator[Player]:
    """Opens the model of a run, or that of a config, and the questions to ask.

    Args:
        given: the config; `questions.dev` and `eval.samples` say what is asked.
        workdir: the run's folder; None: the config's own model, untrained.
        folder: where a tiny model is, or is made.
    """
    config = RlvrConfig.of(given)
    if config.env.verifiers:
        raise InputError(
            f"the run's environment is {config.env.verifiers!r} (config.env.verifiers), whose "
            "episodes are played and written by `qrag evaluate`; give that command."
        )
    mesh = mesh_of_run(config, workdir)
    with StopSignal() as stop:
        inputs = load_inputs(config, folder, mesh, trains=False)
        libraries: dict[str, Library] = {config.tools.retriever: inputs.library}
        yield Player(given, Rlvr(config, mesh, inputs, folder), workdir, stop, libraries)


def keys_of(seed: int, first: int, tasks: int, draws: int) -> np.ndarray:
    """Keys of the draws `[task, draw]` of the questions `first`, `first + 1`, …"""
    key = jax.random.fold_in(jax.random.key(seed), _PREDICTED)
    return np.asarray(draw_keys(key, np.arange(first, first + tasks, dtype=np.uint32), draws))


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
