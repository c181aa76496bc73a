"""Scores a LeReT run hop by hop, beside all that it should be better than.

Beside the trained weights, asked by the bare prompt, are: the question itself as the query, the
question with the best passage found so far, the weights at the end of each earlier stage, the
untrained ones, and the prompts that made the tries by the weights that they were made with.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from qrag_jax.evaluators.token_scores import logged
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
from qrag_jax.systems.leret_tries import by_rule, states_of
from qrag_jax.systems.saved_token_run import Predictor, SavedWeights, mesh_of_run
from qrag_jax.systems.scoring import (
    NOT_KEPT,
    PREDICTED,
    Questions,
    ScoreOptions,
    Way,
    are_others,
    begin_scoring,
    beside,
    end_scoring,
    of_others,
)
from qrag_jax.systems.token_system import EVALUATED

KIND = "hops of a query writer"  # in the record beside a file
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "reward", "seed")
_BARE = 0  # number of the prompt
QUESTION, WITH_PASSAGE = "question", "question_and_passage"
_WORDS = 64  # of a query with a passage


def score_query_writer(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    given, out, halves = begin_scoring(workdir, given, options, OF_QUESTIONS)
    pool = out / CORPUS if of_others(workdir, given, OF_QUESTIONS) else None
    with open_hop_predictor(given, workdir, pool=pool) as predictor:
        system, stop = predictor.system, predictor.stop
        questions, record = halves(system.inputs.drawn), {**predictor.settings}
        record["data"] = {name: system.inputs.data[name] for name in ("model", "prompt", "corpus")}
        asked = dataclasses.replace(predictor.questions, size=0)
        ways = _ways(system, options.checkpoint, stop)
        logs, notes = asked.played(out, ways, record, stop, restart=options.restart)
    rows = {way.told: HOPS.read(logs[way.name]) for way in ways if way.name in logs}
    main = ways[0].told
    summary = beside(rows, main, hop_summary, hop_gains)
    hops = len(rows[main][0].hops)
    lines = hop_table(summary["scores"], hops)
    for told, gain in filter(lambda each: each[1], summary["gains"].items()):
        interval = interval_text(gain[f"hop{hops}/all_gold"], sign=True)
        lines.append(f"{main} - {told}, all gold: {interval}")
    summary |= {"questions": questions, "notes": notes}
    return end_scoring(out, given, summary, [*lines, questions["line"]])


def _ways(system: Leret, checkpoint: str, stop: StopSignal) -> list[Way[Searched]]:
    """All ways, the run's own first."""
    hops, plan, saved = system.hops, system.config.plan, SavedWeights(system)
    own = saved.checkpoint(checkpoint)

    def way(
        name: str, told: str, params: Callable[[], Any], variant: int = 0, by: str = ""
    ) -> Way[Searched]:
        # Weights are read when they play, and then dropped: a large model has no room for all.
        def play(params: Any, shown: Sequence[QueryState], first: int) -> list[Searched]:
            greedy, prompt = system.config.eval.greedy, system.prompt if variant else None
            by_device = system.by_device(params, stop, greedy=greedy, prompt=prompt)
            return logged(shown, hops.by_model(shown, by_device, EVALUATED, variant))

        return Way(name, told, play, params, {"way": name, "by": by})

    def ruled(name: str, told: str, write: Callable[[QueryState], str]) -> Way[Searched]:
        plays = by_rule(system.inputs.library, system.config.writing.k, write)

        def play(params: Any, shown: Sequence[QueryState], first: int) -> list[Searched]:
            return logged(shown, hops.by_model(shown, plays, EVALUATED))

        return Way(name, told, play, record={"way": name, "by": ""}, by_model=False)

    def after(end: int) -> Any:
        return NOT_KEPT if (params := saved.after(end)) is None else params

    def first() -> Any:
        return system.untrained

    ways = [way(own.name, own.told, lambda: own.params, by=own.digest)]
    for stage in plan:
        end = stage.first + stage.steps
        if end < own.step:
            of = f" of iteration {stage.iteration}" if stage.iteration else ""
            told = f"after {stage.kind}{of}, step {end}"
            ways.append(way(f"stage-{end}", told, partial(after, end)))
    ways.append(way("untrained", "untrained", first))
    if _has_prompts(system):
        prompt = system.prompt
        asked_by = partial(after, plan[0].steps) if plan[0].kind == SCRIPT else first
        for variant in filter(None, system.variants):
            name = prompt.names[variant]
            digest = hashlib.sha256(repr(prompt.variants[variant - 1]).encode()).hexdigest()[:16]
            told = f"prompt {name}, by what made the first tries"
            ways.append(way(f"prompt-{name}", told, asked_by, variant, digest))
    told = "the question and the first passage"
    ways.append(ruled(QUESTION, "the question", _question))
    return [*ways, ruled(WITH_PASSAGE, told, _with_passage)]


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
            # As many in a part as in training, whose memory suffices
            Questions(HOPS, inputs.dev, lambda row, state: row.id == state.id, size),
            play=play,
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
        found = system.tries.iteration(iteration, refused, StopSignal())
    speech, states = system.inputs.speech, states_of(config, found)
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
