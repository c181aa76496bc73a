"""Scores a trained retriever: python -m qrag_jax.evaluate --workdir=runs/hotpotqa

Runs of agents (HARR), of language models with tools (RLVR), of query writers (LeReT) and of query
rewriters (DeepRetrieval) are scored by the same command, and with --system=FILE.py those of a
system of your own, by its own `evaluate`.

Any field of the run's config can be overridden, for example
`--config.data.path=FOLDER --out=OTHER` to score other data. Priority: command line, then the file
given by `--eval_config`, then the run's saved config.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.feedback.llm import FeedbackLost
from qrag_jax.runtime import commandline
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems import (
    deepretrieval_config,
    harr_config,
    leret_config,
    q_rag_config,
    rlvr_config,
    run_flags,
)
from qrag_jax.systems.deepretrieval_scoring import score_rewriter
from qrag_jax.systems.harr_scoring import score_agent
from qrag_jax.systems.leret_scoring import score_query_writer
from qrag_jax.systems.q_rag_scoring import DATA, score_run
from qrag_jax.systems.rlvr_scoring import score_language_model
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.scoring import SUMMARY, ScoreOptions, are_others

SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to score, 0 for all.", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "Folder of logs and summaries; default WORKDIR/eval.")
SAMPLED = flags.DEFINE_integer(
    "sampled",
    0,
    "Of agents: episodes drawn per question, for pass@k; of RLVR for vote@k, too.",
    lower_bound=0,
)
RETRIEVERS = flags.DEFINE_list("retrievers", [], "Of RLVR: bm25,golden,…; default the run's own.")
RESTART = flags.DEFINE_bool("restart", False, "Throw partial logs away instead of resuming them.")
WRITERS = leret_config.NAME, deepretrieval_config.NAME
SCORED = {
    harr_config.NAME: score_agent,
    rlvr_config.NAME: score_language_model,
    leret_config.NAME: score_query_writer,
    deepretrieval_config.NAME: score_rewriter,
}


def main() -> int:
    """Reads the flags and scores."""
    workdir, config = run_flags.workdir(), flags.FLAGS.config
    system = config.get("system")
    if RETRIEVERS.value and system != rlvr_config.NAME:
        raise InputError(f"--retrievers is for runs of {rlvr_config.NAME}; leave it out.")
    if SAMPLED.value and system in WRITERS:
        raise InputError("--sampled is for runs of agents; leave it out.")
    if system in SCORED:
        return _score_episodes(workdir, config)
    if SAMPLED.value:
        raise InputError("--sampled is for runs of agents; leave it out.")
    if system not in (None, run_flags.Q_RAG):
        return _score_outside(workdir, config)
    saved = q_rag_config.load_config(workdir / CONFIG_NAME)
    options = _options()
    are_others(workdir, config, DATA, options.out)
    hold_out = (config.data.path, config.eval.path) == (saved.data.path, saved.eval.path)
    with commandline.writing(OUT.value or workdir / "eval", "--out"):
        score_run(SavedRun.open(workdir, config), options, hold_out=hold_out)
    return 0


def _options() -> ScoreOptions:
    return ScoreOptions(
        checkpoint=run_flags.checkpoint(),
        samples=SAMPLES.value,
        sampled=SAMPLED.value,
        retrievers=tuple(RETRIEVERS.value),
        out=Path(OUT.value) if OUT.value else None,
        restart=RESTART.value,
    )


def _score_episodes(workdir: Path, config: ConfigDict) -> int:
    with commandline.writing(OUT.value or workdir / "eval", "--out"):
        try:
            SCORED[config.system](workdir, config, _options())
        except Stopped as stopped:
            print(f"{stopped}: stopped, what is scored is kept; give the same command to go on.")
            return 128 + signal.Signals[str(stopped)]
        except FeedbackLost as error:
            reason = str(error).rstrip(".")
            print(f"error: {reason}. Give the same command to go on.", file=sys.stderr)
            return 1
    return 0


def _score_outside(workdir: Path, config: ConfigDict) -> int:
    """Scores a run of a system outside the package, as its training does."""
    if SAMPLES.value:
        raise InputError(f"--samples is not for runs of {config.system}; leave it out.")
    out = Path(OUT.value) if OUT.value else workdir / "eval"
    opened = systems.saved_system(workdir, config, run_flags.checkpoint())
    with opened as (system, state, step), StopSignal() as stop:
        found = system.evaluate(state, step, stop)
        summary = {"checkpoint": run_flags.checkpoint(), "step": step, "scores": found.scores}
        with commandline.writing(out, "--out"):
            out.mkdir(parents=True, exist_ok=True)
            write_whole(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
        print(f"{found.line}\nsummary: {out / 'summary.json'}")
    return 0


def define_flags(argv: Sequence[str]) -> None:
    """Defines the flags that a run's config gives."""
    run_flags.define(argv, (run_flags.Q_RAG, *SCORED), outside=True)


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
