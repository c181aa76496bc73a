"""Scores a HARR run: its agent answers the evaluation questions, with three retrievers.

They are the one that was trained, the encoder that it started from in the same states, and this
encoder by the sub-query alone. All search greedily.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.errors import InputError
from qrag_jax.evaluators.agents import agent_row
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.learners import placement
from qrag_jax.metrics import agent_log
from qrag_jax.metrics.agent_log import AgentRow, pass_at, summarised
from qrag_jax.metrics.bootstrap import columns_text, interval_text, paired_interval
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.rollouts.agents import Episode
from qrag_jax.runtime import determinism
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import log_locks
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.harr import Harr
from qrag_jax.systems.harr_config import HarrConfig
from qrag_jax.systems.harr_inputs import Asked, load_inputs
from qrag_jax.systems.harr_models import open_models
from qrag_jax.systems.scored_ways import of_others
from qrag_jax.systems.scoring import check_own_data

SUMMARY = "summary.json"
_OF_QUESTIONS = ("data.path", "data.sources", "eval.path")
AT_ONCE = 256  # questions played side by side, and written together
_SAMPLED = 2**31 - 2  # in place of a step's number: of draws for pass@k
_STATELESS = "untrained, the sub-query alone"


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """What is scored, and where the scores are written.

    Attributes:
        checkpoint: "best" or "last".
        samples: number of questions to score, 0 for all.
        sampled: episodes drawn per question for pass@k, besides the greedy one; 0: none.
        out: folder of logs and summary; None: `eval` in the run's folder.
        restart: throw partial logs away.
    """

    checkpoint: str
    samples: int = 0
    sampled: int = 0
    out: Path | None = None
    restart: bool = False


def score_agent(workdir: Path, given: ConfigDict, options: AgentOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary.

    Raises:
        Stopped: a signal came; the same command goes on.
        FeedbackLost: the agent's language model is gone, or too many episodes break.
    """
    if not (workdir / FOLDER).exists():
        raise InputError(f"{workdir} holds no encoder; --workdir must be a run that was trained.")
    given = given.copy_and_resolve_references()
    if not options.out:
        check_own_data(workdir, ConfigDict(read_fields(workdir / CONFIG_NAME)), given)
    others = bool(of_others(workdir, given, _OF_QUESTIONS))
    chose = report_on(given, options.samples, others=others)
    given.questions.kept = ""  # only training needs it
    config = HarrConfig.of(given)
    if told := determinism.ask(config.runtime.deterministic):
        print(told)
    mesh = make_mesh(config.runtime.mesh)
    with open_models(config, workdir) as models, StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, stop, is_kept=True)
        models.wait(stop)
        system = Harr(config, mesh, inputs, models)
        alone = dataclasses.replace(config.state, stateful=False)
        stateless = Harr(dataclasses.replace(config, state=alone), mesh, inputs, models)
        params, step = checkpoint_params(system, workdir, options.checkpoint)
        first = placement.place(inputs.encoder.trained, system.learner.shardings.params)
        label = f"trained, {options.checkpoint} checkpoint of step {step}"
        ways = {_STATELESS: (stateless, first), "untrained": (system, first)}
        ways[label] = (system, params)
        out = options.out or workdir / "eval"
        record = _record(given, inputs.data, [each.gold.id for each in inputs.dev], options)
        record["answers depend on"] = json.loads(json.dumps(models.provenance))
        played: dict[str, list[AgentRow]] = {}
        for name, (how, weights) in ways.items():
            folder = f"{options.checkpoint}-{step}" if name == label else name.replace(", ", "-")
            log = out / folder.replace(" ", "-") / f"agent_seed{config.eval.seed}.jsonl"
            sampled = options.sampled if name == label else 0
            with log_locks(log):
                own = {"way": name, "weights": encoder_key(weights, {})}
                agent_log.begin(log, record | own, restart=options.restart)
                played[name] = played_rows(how, weights, log, sampled, stop)
    summary: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step}
    summary["questions"] = inputs.drawn.summary(chose, others=others)
    summary["scores"] = {name: summarised(rows) for name, rows in played.items()}
    summary["gains"] = {
        name: _gains(played[label], rows) for name, rows in played.items() if name != label
    }
    if options.sampled:
        summary["pass@k"] = _passes(played[label], options.sampled)
    write_whole(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    print(_table(summary))
    print(summary["questions"]["line"])
    print(f"logs and summary: {out}")
    return summary


def checkpoint_params(system: Harr, workdir: Path, name: str) -> tuple[Any, int]:
    """The trained parameters of a run's checkpoint "best" or "last", and its step."""
    template = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        system.inputs.encoder.trained,
        system.learner.shardings.params,
    )
    return Checkpoints(workdir, read_only=True).restore_params(name, template)


def _record(
    given: ConfigDict, data: dict[str, str], ids: Sequence[str], options: AgentOptions
) -> dict[str, Any]:
    """All that the rows of a log depend on, besides the weights and the states they read."""
    free = (
        *("train", "optimizer", "runtime", "profile", "grpo", "ppo"),
        *("llm", "reranker", "questions"),
    )
    config = {name: value for name, value in given.to_dict().items() if name not in free}
    return {
        "config": json.loads(json.dumps(config)),
        "data": data,
        "questions": len(ids),
        "sampled": options.sampled,
    }


def played_rows(
    system: Harr, params: Any, log: Path, sampled: int, stop: StopSignal
) -> list[AgentRow]:
    """The rows of all questions; those that the log lacks are played."""
    rows = agent_log.read_partial(log)
    asked, player = system.inputs.dev, system.player
    if [row.id for row in rows] != [each.gold.id for each in asked[: len(rows)]]:
        raise InputError(f"{log} has other questions; give --restart to throw it away.")
    with tqdm(total=len(asked), initial=len(rows), unit="question", desc=log.parent.name) as bar:
        while len(rows) < len(asked):
            part = asked[len(rows) : len(rows) + AT_ONCE]
            starts = player.starts(part, 1, _SAMPLED, len(rows))
            episodes = player.play(params, starts, stop, is_greedy=True)
            new = [agent_row(each.gold, episode) for each, episode in zip(part, episodes)]
            if sampled:
                starts = player.starts(part, sampled, _SAMPLED, len(rows))
                drawn = player.play(params, starts, stop)
                new = [
                    _with_samples(row, each, drawn[i * sampled : (i + 1) * sampled])
                    for i, (row, each) in enumerate(zip(new, part, strict=True))
                ]
            agent_log.append(log, new)
            rows += new
            bar.update(len(new))
    return rows


def _with_samples(row: AgentRow, asked: Asked, drawn: Sequence[Episode]) -> AgentRow:
    scored = [agent_row(asked.gold, episode) for episode in drawn]
    whole = [each for each in scored if not each.failed]
    right = sum(each.em > 0 for each in whole)
    return dataclasses.replace(row, right=right, sampled=len(whole))


def _gains(rows: Sequence[AgentRow], others: Sequence[AgentRow]) -> dict[str, Any]:
    """Paired differences over the questions that failed in neither."""
    both = [(a, b) for a, b in zip(rows, others, strict=True) if not a.failed and not b.failed]
    gains = {}
    for name in ("em", "f1", "recall"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in both]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
        if pairs:
            mean, low, high = paired_interval(*np.transpose(pairs))
            gains[name] = {"mean": mean, "low": low, "high": high}
    return gains


def _passes(rows: Sequence[AgentRow], sampled: int) -> dict[str, float]:
    found = {}
    k = 1
    while k <= sampled:
        known = [row for row in rows if row.right is not None and row.sampled >= k]
        if known:
            each = [pass_at(k, row.right or 0, row.sampled) for row in known]
            found[str(k)] = float(np.mean(each))
        k *= 2
    return found


def _table(summary: dict[str, Any]) -> str:
    columns = ("em", "f1", "recall", "hops")
    lines = [["", *columns, *(losses := ("broken", "failed"))]]
    for name, scores in summary["scores"].items():
        cells = [interval_text(scores[c]) if c in scores else "" for c in columns]
        lost = (f"{scores[each]} of {scores['questions']}" for each in losses)
        lines.append([name, *cells, *lost])
    for name, gains in summary["gains"].items():
        cells = [interval_text(gains[c], sign=True) if c in gains else "" for c in columns]
        lines.append([f"gain over {name}", *cells, *("" for _ in losses)])
    text = columns_text(lines)
    if "pass@k" in summary:
        passes = ", ".join(f"{k}: {value:.3f}" for k, value in summary["pass@k"].items())
        text.append(f"pass@k of drawn passages: {passes}")
    return "\n".join(text)
