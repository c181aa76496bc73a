"""Scores a LeReT run hop by hop, beside all that it should be better than.

Beside the trained weights, asked by the bare prompt, are: the question itself as the query, the
question with the best passage found so far, the weights at the end of each earlier stage, the
untrained ones, and the prompts that made the tries by the weights that they were made with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.environments.queries import QueryState
from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics.bootstrap import interval_text
from qrag_jax.metrics.rows import HOPS, Searched
from qrag_jax.metrics.summaries import hop_gains, hop_summary, hop_table
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import run_lock, write_whole
from qrag_jax.systems import scoring
from qrag_jax.systems.leret import CORPUS, OF_QUESTIONS, Leret, digest_of, load_inputs
from qrag_jax.systems.leret_config import SCRIPT, LeretConfig
from qrag_jax.systems.leret_tries import by_rule, search_hops, states_of
from qrag_jax.systems.token_system import EVALUATED

# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "reward", "seed")
_WORDS = 64  # of a query with a passage


def score_query_writer(
    workdir: Path, raw: ConfigDict, options: scoring.ScoreOptions
) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    raw, out, halves = scoring.begin_scoring(workdir, raw, options, OF_QUESTIONS)
    pool = out / CORPUS if scoring.of_others(workdir, raw, OF_QUESTIONS) else None
    with open_hop_predictor(raw, workdir, pool=pool, scores=True) as predictor:
        ways = _ways(predictor, options.checkpoint)
        found, notes = predictor.questions.played(
            out, ways, {}, predictor.stop, restart=options.restart
        )
        questions = halves(predictor.system.inputs.drawn)
    rows = {way.label: HOPS.read(log) for way, log in found}
    main = found[0][0].label
    summary = scoring.beside(rows, main, hop_summary, hop_gains)
    hops = len(rows[main][0].hops)
    lines = hop_table(summary["scores"], hops)
    for way, gain in filter(lambda each: each[1], summary["gains"].items()):
        interval = interval_text(gain[f"hop{hops}/all_gold"], sign=True)
        lines.append(f"{main} - {way}, all gold: {interval}")
    summary |= {"questions": questions, "notes": notes}
    return scoring.end_scoring(out, raw, summary, [*lines, questions["line"]])


def _ways(predictor: scoring.Predictor, checkpoint: str) -> Iterator[scoring.Way[Searched]]:
    """All ways, the run's own first."""
    system = predictor.system
    config, library = system.config, system.inputs.library
    yield from map(predictor.way, predictor.ways(checkpoint))
    first = config.plan[0]
    try:
        variants = system.variants
    except InputError:  # prompts with examples are made in training
        variants = ()
    for variant in filter(None, variants):
        by = predictor.after(first) if first.kind == SCRIPT else predictor.weights(scoring.FIRST)
        name, asks = system.prompt.names[variant], system.prompt.variants[variant - 1]
        digest = hashlib.sha256(repr(asks).encode()).hexdigest()[:16]

        def play(params: Any, shown: Sequence[QueryState], _: int, n: int = variant) -> Any:
            return system.searched(params, shown, predictor.stop, variant=n)

        label = f"prompt {name}, by what made the first tries"
        yield predictor.way(by, f"prompt-{name}", label, play, prompt=digest)

    def ruled(name: str, label: str, write: Callable[[QueryState], str]) -> scoring.Way[Searched]:
        plays = by_rule(library, config.writing.k, write)

        def play(_: Any, shown: Sequence[QueryState], first: int) -> list[Searched]:
            return search_hops(config, library, shown, plays, EVALUATED)[0]

        return scoring.Way(name, label, play, record=predictor.record, by_model=False)

    yield ruled("question", "the question", lambda state: one_line(state.question))
    yield ruled("question_and_passage", "the question and the first passage", _with_passage)


def _with_passage(state: QueryState) -> str:
    passage = state.pool[0].text if state.pool else ""
    return " ".join(f"{state.question} {passage.lstrip('# ')}".split()[:_WORDS])


@contextlib.contextmanager
def open_hop_predictor(
    raw: ConfigDict,
    workdir: Path,
    *,
    trains: bool = False,
    pool: Path | None = None,
    scores: bool = False,
) -> Iterator[scoring.Predictor]:
    """Opens the model of a run, and the questions to ask.

    Args:
        scores: all are asked at once, by the draws of the evaluations of the training.
    """
    config = LeretConfig.of(raw)
    mesh, size = scoring.mesh_of_run(config, workdir), config.tries.questions
    every = raw.to_dict()
    with StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, trains=trains, pool=pool)
        system = Leret(config, mesh, inputs, workdir)

        def play(params: Any, states: Sequence[QueryState], first: int) -> list[Searched]:
            stream = EVALUATED if scores else scoring.PREDICTED + first // size
            return system.searched(params, states, stop, stream)

        record = {name: every[name] for name in _OF_PLAY} | {
            "questions": digest_of(inputs.dev),
            "greedy": config.eval.greedy,
            "tries": every["tries"],
            "data": {name: key for name, key in inputs.data.items() if name != "questions"},
        }
        # As many in a part as in training, whose memory suffices
        questions: scoring.Questions[QueryState, Searched] = scoring.Questions(
            HOPS, inputs.dev, lambda row, state: row.id == state.id, 0 if scores else size
        )
        yield scoring.Predictor(system, stop, questions, play, record)


def write_pairs(system: Leret, iteration: int, path: Path) -> tuple[int, int, int]:
    """Writes the pairs of an iteration's tries as JSON lines: `prompt`, `chosen`, `rejected`.

    These are the columns that TRL's `DPOTrainer` reads. `prompt` is the text of the bare prompt.
    The tries are read from the run's folder, in which nobody may train meanwhile, and are paired as
    the run pairs them. Weights of pairs are not in the file.

    Returns:
        Numbers of pairs, of states that have some, and of those that have none.
    """
    config = system.config
    if not 1 <= iteration <= config.iterations:
        raise InputError(
            f"--iteration={iteration}: the run has the iterations 1 to {config.iterations}."
        )
    with run_lock(system.workdir):
        found = system.tries.iteration(iteration, None, StopSignal())
    speech, states = system.inputs.speech, states_of(config, found)
    lines, paired = list[str](), [state for state in states if state.pairs]
    for state in paired:
        assert state.at is not None
        shown = found.states[state.at].asked_by(0)
        ids = speech.scaffold.opening(system.prompt.messages(shown))
        text = speech.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        for pair in state.pairs:
            chosen, rejected = (state.queries[n].query for n in (pair.winner, pair.loser))
            # ASCII alone, so that half surrogate pairs, which models do write, survive.
            lines.append(json.dumps({"prompt": text, "chosen": chosen, "rejected": rejected}))
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return len(lines), len(paired), len(states) - len(paired)
