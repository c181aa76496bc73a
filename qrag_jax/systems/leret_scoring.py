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
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.environments.few_shot import NAME as EXAMPLES
from qrag_jax.environments.few_shot import read_few_shot
from qrag_jax.environments.queries import QueryState
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.evaluators.query_scores import logged
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics.bootstrap import interval_text
from qrag_jax.metrics.rows import HOPS, Searched
from qrag_jax.metrics.summaries import hop_gains, hop_summary, hop_table
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import run_lock, write_whole
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import FEW_SHOT, SCRIPT, SFT, LeretConfig
from qrag_jax.systems.leret_inputs import CORPUS, OF_QUESTIONS, digest_of, load_inputs
from qrag_jax.systems.leret_pairs import states_of
from qrag_jax.systems.saved_token_run import Predictor, SavedWeights, mesh_of_run
from qrag_jax.systems.scoring import (
    ASKED,
    NOT_KEPT,
    PREDICTED,
    ScoreOptions,
    Way,
    WayLogs,
    are_others,
    of_others,
    write_summary,
)
from qrag_jax.systems.token_system import EVALUATED

KIND = "hops of a query writer"  # in the record beside a file
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "reward", "seed")
_BARE = 0  # number of the prompt
QUESTION, WITH_PASSAGE = "question", "question_and_passage"
_WORDS = 64  # of a query with a passage

Played = list[Searched] | str  # see `Way.play`


def score_query_writer(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    given = given.copy_and_resolve_references()
    new = bool(of_others(workdir, given, ASKED))
    chose = report_on(given, options.samples, others=new)
    out = options.out or workdir / "eval"
    others = are_others(workdir, given, OF_QUESTIONS, options.out)
    pool = out / CORPUS if others else None
    with open_hop_predictor(given, workdir, pool=pool) as predictor:
        system, stop = predictor.system, predictor.stop
        ways = _ways(system, options.checkpoint, stop)
        halves = system.inputs.drawn.summary(chose, others=new)
        of_all: dict[str, Any] = {**predictor.settings}
        of_all["data"] = {name: system.inputs.data[name] for name in ("model", "prompt", "corpus")}
        logs = WayLogs(
            out,
            HOPS,
            read=HOPS.read,
            record=lambda way: {"way": way.name, "by": way.by, **of_all},
        )
        rows, notes = logs.played(ways, stop, restart=options.restart)
    main = ways[0].told
    summaries = {told: hop_summary(each) for told, each in rows.items()}
    gains = {told: hop_gains(rows[main], each) for told, each in rows.items() if told != main}
    summary = {"main": main, "questions": halves, "scores": summaries, "gains": gains}
    found = write_summary(out, given, {**summary, "notes": notes})
    hops = len(rows[main][0].hops)
    print("\n".join(hop_table(summaries, hops)))
    for told, gain in filter(lambda each: each[1], gains.items()):
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
            greedy, prompt = system.config.eval.greedy, system.prompt if variant else None
            by_device = system.by_device(params, stop, greedy=greedy, prompt=prompt)
            return logged(shown, hops.by_model(shown, by_device, EVALUATED, variant))

        return play

    def by_rule(write: Callable[[QueryState], str]) -> Callable[[], Played]:
        return lambda: logged(shown, hops.by_rule(shown, write))

    def first() -> Any:
        return system.untrained

    ways = [Way(own.name, own.told, by(lambda: own.params), by=own.digest)]
    for stage in plan:
        end = stage.first + stage.steps
        if end < own.step:
            of = f" of iteration {stage.iteration}" if stage.iteration else ""
            told = f"after {stage.kind}{of}, step {end}"
            ways.append(Way(f"stage-{end}", told, by(partial(saved.after, end))))
    ways.append(Way("untrained", "untrained", by(first)))
    if _has_prompts(system):
        prompt = system.prompt
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


def pool_beside(workdir: Path, given: ConfigDict, out: Path | None) -> Path | None:
    """The folder of the pooled passages of other questions than the run's; None: the run's pool.

    Args:
        out: the file that is named for them; None: none is.
    """
    others = are_others(workdir, given, OF_QUESTIONS, out, "predictions.jsonl")
    return out.with_suffix(f".{CORPUS}") if out and others else None


@contextlib.contextmanager
def open_hop_predictor(
    given: ConfigDict, workdir: Path, *, trains: bool = False, pool: Path | None = None
) -> Iterator[Predictor[Leret, QueryState, Searched]]:
    """Opens the model of a run, and the questions to ask."""
    config = LeretConfig.of(given)
    mesh, size = mesh_of_run(config, workdir), config.tries.questions
    ends = [each.first + each.steps for each in config.plan if each.kind == SFT]
    every = json.loads(json.dumps(given.to_dict()))
    with StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, trains=trains, pool=pool)
        system = Leret(config, mesh, inputs, workdir)

        def play(params: Any, states: Sequence[QueryState], first: int) -> list[Searched]:
            device = system.by_device(params, stop, greedy=config.eval.greedy)
            return logged(states, system.hops.by_model(states, device, PREDICTED + first // size))

        yield Predictor(
            system,
            stop,
            rows=HOPS,
            asked=inputs.dev,
            size=size,  # as many as in training, whose memory suffices
            play=play,
            is_of=lambda row, state: row.id == state.id,
            names=("question", "questions"),
            settings={name: every[name] for name in _OF_PLAY}
            | {"questions": digest_of(inputs.dev), "greedy": config.eval.greedy},
            record={
                "kind": KIND,
                "tries": every["tries"],
                "data": {name: key for name, key in inputs.data.items() if name != "questions"},
            },
            imitated=(ends[0] if ends else 0, "after sft"),
        )


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
    folder = system.tries.folder(iteration)

    def refused(*_: Any) -> list[TokenEpisode]:
        raise InputError(
            f"the tries of iteration {iteration} in {folder} are not finished; train on first."
        )

    with run_lock(system.workdir):
        if not (folder / "hop-1.jsonl").exists():
            refused()
        weights = system.tries.weights_of(iteration)
        found = system.tries.iteration(iteration, refused, weights, StopSignal())
    speech, states = system.inputs.speech, states_of(config, iteration, found)
    lines, paired = list[str](), [state for state in states if state.pairs]
    for state in paired:
        assert state.at is not None
        shown = found.states[state.at].asked_by(_BARE)
        ids = speech.scaffold.opening(system.prompt.messages(shown))
        text = speech.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        for pair in state.pairs:
            chosen, rejected = (state.queries[n].query for n in (pair.winner, pair.loser))
            # ASCII alone, so that half surrogate pairs, which models do write, survive.
            lines.append(json.dumps({"prompt": text, "chosen": chosen, "rejected": rejected}))
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return len(lines), len(paired), len(states) - len(paired)
