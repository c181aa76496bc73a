"""The rows of HARR: MiniLM learns inside the scripted agent, which then asks the test questions.

The agent is told the data's decomposition, and the answer of each hop. HotpotQA has none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept_runs import metrics
from benchmarks.which_cases import course, single
from benchmarks.which_cases.found import Asking, Found, by_turns
from benchmarks.which_cases.measured import once, per_question
from benchmarks.which_cases.row import TRAINED, UNTRAINED, Place, Result, training_of
from benchmarks.which_cases.settings import Setting
from qrag_jax.environments.rag.episode import Hop, Retrieve
from qrag_jax.environments.rag.state_text import Fitted, StateText
from qrag_jax.metrics import agent_log
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.retrieval.opening import EXACT
from qrag_jax.rollouts.pool_search import QueryRows
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems.harr_config import HarrConfig, load_config
from qrag_jax.systems.harr_inputs import INDEX
from qrag_jax.systems.passage_encoder import PassageEncoder

# 64 episodes a step by both: groups of 8 of one question, or one of each question.
BATCHES = {
    "grpo": ("--config.train.batch_size=8", "--config.grpo.members=8"),
    "ppo": ("--config.train.batch_size=64", "--config.ppo.members=1"),
}
STATELESS = "untrained, sub-queries alone"
_WARM = 8  # questions of the command that shows what starting takes


def harr(place: Place, algorithm: str, variant: str = "minilm") -> Result:
    """HARR by `algorithm`: the scripted agent, which knows the decompositions, searches."""
    workdir, given = place.folder / "run", place.setting
    fields = {
        "data.path": given.choosing,
        "corpus.path": given.folder / "corpus.jsonl",
        "seed": place.seed,
        "eval.best_by": "recall",
        "eval.part": "all",  # of the questions for choices; the test's are others
    }
    words = [f"--config=configs/harr_{algorithm}.py:{variant}", f"--workdir={workdir}"]
    words += [f"--config.{name}={value}" for name, value in fields.items()]
    words += [*BATCHES[algorithm], *place.flags]
    cost = once(place.folder, "train", "qrag_jax.train", *words)
    scoring = ["qrag_jax.evaluate", f"--workdir={workdir}", "--checkpoint=best"]
    scoring.append(f"--config.data.path={given.testing}")
    out = place.folder / "test"
    small = (*scoring, f"--samples={_WARM}")
    # Before, so that all is compiled and kept; after, to see what starting takes.
    once(place.folder, "few, compiling", *small, f"--out={place.folder / 'compiling'}")
    full = once(place.folder, "test", *scoring, f"--out={out}")
    few = once(place.folder, "few", *small, f"--out={place.folder / 'few'}")
    summary = json.loads((out / "summary.json").read_text())
    config = HarrConfig.of(load_config(workdir / CONFIG_NAME))
    logs = {
        TRAINED: f"best-{summary['step']}",
        UNTRAINED: "untrained",
        STATELESS: "untrained-the-sub-query-alone",
    }
    read = {way: _log(out / name) for way, name in logs.items()}
    # The three ways are played one after the other, and differ little in what they do.
    milliseconds = per_question(few, full, _WARM, len(read[TRAINED]))
    each = None if milliseconds is None else milliseconds / len(logs)
    size = single.size(workdir / INDEX, EXACT)
    ways = {
        way: {given.name: _of_agent(rows, config, workdir, way, each, size, given)}
        for way, rows in read.items()
    }
    searches = metrics(workdir, "train/env_steps")  # [] if it ended before it told any
    went = course.of_run(workdir, cost)
    training = training_of(cost, course=went)
    if searches:
        # Estimated: the states of a search in training are as long as those of the test.
        asking = ways[TRAINED][given.name].asking
        tokens = searches[-1] * asking.encoder_tokens / asking.searches
        training = training_of(cost, course=went, tokens=tokens, searches=searches[-1])
    told = f"best checkpoint, step {summary['step']}, by the recall on the questions for choices"
    return Result(ways, training, told)


def _log(folder: Path) -> list[AgentRow]:
    (path,) = folder.glob("*.jsonl")
    return agent_log.read_partial(path)


def _of_agent(
    rows: Sequence[AgentRow],
    config: HarrConfig,
    workdir: Path,
    way: str,
    milliseconds: float | None,
    size: int,
    given: Setting,
) -> Found:
    lists = {row.id: by_turns([hop["names"] for hop in row.searches]) for row in rows}
    left_out = len(given.test) - len(lists)
    note = (
        "the scripted agent is told the decomposition and the answer of each hop, and looks for it "
        "in 3 passages a search, wherever the list is cut"
    )
    if left_out:
        note += f"; {left_out} questions have no decomposition that it can follow, and count as 0"
        lists |= {asked.id: () for asked in given.test if asked.id not in lists}
    stateful = config.state.stateful and way != STATELESS
    asking = Asking(
        milliseconds,
        encoder_tokens=_state_tokens(rows, config, workdir, stateful=stateful),
        searches=sum(len(row.searches) for row in rows) / len(rows),
    )
    return Found(lists, asking, size, note)


def _state_tokens(
    rows: Sequence[AgentRow], config: HarrConfig, workdir: Path, *, stateful: bool
) -> float:
    """Mean tokens of all states of a question, written as the run writes them."""
    encoder = PassageEncoder.of_folder(
        str(workdir / FOLDER), dataclasses.replace(config.encoder, path=str(workdir / FOLDER))
    )
    form = encoder.encoder
    longest = min(config.state.max_tokens, form.max_positions)
    made = QueryRows(encoder.tokenizer, form.state_opening, form.sep_id, longest)
    instruction = None if config.state.instruction else ""
    states = StateText(stateful, instruction, made.room, made.count)
    total = 0
    for row in rows:
        history: tuple[Hop, ...] = ()
        for hop in row.searches:
            fitted = states.of(row.question, Retrieve(hop["query"], history))
            assert isinstance(fitted, Fitted)  # else the episode would have broken
            total += len(made.of([fitted.text])[0])
            history += (Hop(hop["query"], hop["answer"], hop["status"]),)
    return total / len(rows)
