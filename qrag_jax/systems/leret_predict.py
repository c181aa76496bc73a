"""Plays questions by the query writer of a run, and writes the pairs that its tries gave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.query_scores import logged
from qrag_jax.feedback.later_credit import credited
from qrag_jax.feedback.preference_pairs import pairs_of
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.metrics import hop_log
from qrag_jax.metrics.hop_log import Searched
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import run_lock
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import SFT, LeretConfig
from qrag_jax.systems.leret_inputs import CORPUS, OF_QUESTIONS, fingerprint, load_inputs
from qrag_jax.systems.leret_tries import FOLDER, START
from qrag_jax.systems.played_parts import PlayedParts
from qrag_jax.systems.saved_token_run import (
    FIRST,
    IMITATED,
    SavedWeights,
    Weights,
    digest_of_weights,
    mesh_of_run,
)
from qrag_jax.systems.scored_ways import of_others

KIND = "hops of a query writer"  # in the record beside a file
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "tries", "reward", "seed")
_BARE = 0  # number of the prompt


class Written(NamedTuple):
    """What became of the states of an iteration.

    Attributes:
        pairs: lines of the file.
        states: that have pairs.
        others: states without a pair.
    """

    pairs: int
    states: int
    others: int


@dataclasses.dataclass(frozen=True)
class HopPredictor:
    """Predicts with the model of one run.

    Attributes:
        given: the config, with the questions that are asked.
        system: the run's.
        stop: looked at between parts.
    """

    given: ConfigDict
    system: Leret
    stop: StopSignal

    def weights(self, which: str) -> Weights | None:
        """The weights of "best", "last", "first" or "sft".

        "sft" are those at the end of the first stage of SFT. None: there was no such stage, or its
        end is not kept.
        """
        saved = SavedWeights(self.system)
        if which == FIRST:
            return saved.untrained()
        if which == IMITATED:
            plan = self.system.config.plan
            ends = [each.first + each.steps for each in plan if each.kind == SFT]
            return saved.imitated(ends[0], "after sft") if ends else None
        return saved.checkpoint(which)

    def predict(self, weights: Weights, log: Path, *, restart: bool = False) -> list[Searched]:
        """Plays all questions that the file lacks; returns all rows.

        Args:
            log: the file, `….jsonl`; what it was made with is kept beside it, as `….json`.
            restart: throw the file away instead of going on with it.

        Raises:
            Stopped: a signal came; the same call goes on with the file.
            FeedbackLost: too many tries fail.
        """
        system = self.system
        config = system.config
        play = system.by_device(weights.params, self.stop, greedy=config.eval.greedy)
        parts = PlayedParts(
            rows=hop_log.LOG,
            asked=system.inputs.dev,
            size=config.tries.questions,  # as many as in training, whose memory suffices
            play=lambda states, stream: logged(states, system.hops.by_model(states, play, stream)),
            is_of=lambda row, state: row.id == state.id,
            names=("question", "questions"),
        )
        return parts.into(log, self._record(weights), self.stop, restart=restart)

    def _record(self, weights: Weights) -> dict[str, Any]:
        """All that the rows depend on."""
        inputs, every = self.system.inputs, json.loads(json.dumps(self.given.to_dict()))
        return {
            "kind": KIND,
            "checkpoint": weights.told,
            "questions": fingerprint(inputs.dev),
            "data": {name: key for name, key in inputs.data.items() if name != "questions"},
            "weights": digest_of_weights(weights.params),
            "greedy": self.system.config.eval.greedy,
            **{name: every[name] for name in _OF_PLAY},
        }


def pool_beside(workdir: Path, given: ConfigDict, out: Path | None) -> Path | None:
    """The folder of the pooled passages of other questions than the run's; None: the run's pool.

    Args:
        out: the file that is named for them; None: none is.
    """
    differing = of_others(workdir, given, OF_QUESTIONS)
    if differing and out is None:
        raise InputError(
            f"what is asked is not the run's own (not as in its config: {', '.join(differing)}); "
            "give the file to write, for example --out=predictions.jsonl."
        )
    return out.with_suffix(f".{CORPUS}") if differing and out else None


@contextlib.contextmanager
def open_hop_predictor(
    given: ConfigDict, workdir: Path, *, trains: bool = False, pool: Path | None = None
) -> Iterator[HopPredictor]:
    """Opens the model of a run, and the questions to ask.

    Args:
        given: the config; `questions.dev` and `eval.samples` say what is asked.
        workdir: the run's folder.
        trains: whether the training questions are needed, too.
        pool: see `pool_beside`.
    """
    config = LeretConfig.of(given)
    mesh = mesh_of_run(config, workdir)
    with StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, trains=trains, pool=pool)
        yield HopPredictor(given, Leret(config, mesh, inputs, workdir), stop)


def write_pairs(system: Leret, iteration: int, path: Path) -> Written:
    """Writes the pairs of an iteration's tries as JSON lines: `prompt`, `chosen`, `rejected`.

    These are the columns that TRL's `DPOTrainer` reads. `prompt` is the text of the bare prompt.
    The tries are read from the run's folder, in which nobody may train meanwhile, and are paired as
    the run pairs them. Weights of pairs are not in the file.

    Args:
        system: with the training questions.
        iteration: from 1.
        path: the file.

    Raises:
        OSError: the file cannot be written.
    """
    config = system.config
    if not 1 <= iteration <= config.iterations:
        raise InputError(
            f"--iteration={iteration}: the run has the iterations 1 to {config.iterations}."
        )
    started = system.workdir / FOLDER / f"iteration-{iteration}" / START

    def refused(*_: Any) -> list[TokenEpisode]:
        raise InputError(
            f"the tries of iteration {iteration} in {started.parent} are not finished; train on "
            "first."
        )

    with run_lock(system.workdir):
        if not all(map(Path.exists, (started, started.with_name("hop-1.jsonl")))):
            refused()
        prompt = system.prompt(None)
        weights = str(read_fields(started).get("weights"))
        found = system.tries.iteration(iteration, refused, weights, StopSignal())
    by_state: dict[StateKey, list[Try]] = {}
    for each in credited(found.tries, found.grown_from, config.reward):
        by_state.setdefault(each.at, []).append(each)
    speech = system.inputs.speech
    lines, states = list[str](), 0
    for at, tries in by_state.items():
        state = pairs_of(tries, config.pairs, (config.seed, iteration))
        if not state.pairs:
            continue
        states += 1
        ids = speech.scaffold.opening(prompt.messages(found.states[at].asked_by(_BARE)))
        text = speech.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        for pair in state.pairs:
            chosen, rejected = (state.queries[n].query for n in (pair.winner, pair.loser))
            # ASCII alone, so that half surrogate pairs, which models do write, survive.
            lines.append(json.dumps({"prompt": text, "chosen": chosen, "rejected": rejected}))
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return Written(len(lines), states, len(by_state) - states)
