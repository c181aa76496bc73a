"""Lets a language model answer questions with tools, and writes every episode token by token.

    python -m qrag_jax.predict --workdir=runs/rlvr-quick
    python -m qrag_jax.predict --config=configs/rlvr.py:smol --out=untrained.jsonl

The file has one JSON line for each question and draw: the ids that were observed and sampled with
their log-probabilities, the text of each turn, the parts of the reward and the reward. Give the
same command again to go on after a stop. `qrag evaluate` scores a run, `qrag show` shows files.

    python -m qrag_jax.predict --workdir=runs/leret-quick --iteration=1 --preferences=pairs.jsonl

Of a query writer (LeReT), a line has the queries of a question, and its passages hop by hop.
--preferences writes the pairs of an iteration's tries in TRL's columns: prompt, chosen, rejected.

    python -m qrag_jax.predict --workdir=runs/deepretrieval-quick --questions=queries.txt \
        --out=rewritten.jsonl

Of a query rewriter (DeepRetrieval), a line has the original query, what the model wrote, the query
that was read from it and what that found, where the run has something to search.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import ALL
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.feedback.llm import FeedbackLost
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.runtime import commandline
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems import deepretrieval_config, leret_config, rlvr_config, run_flags
from qrag_jax.systems.deepretrieval_scoring import open_rewriter, rewritten_lines, search_beside
from qrag_jax.systems.leret_scoring import open_hop_predictor, pool_beside, write_pairs
from qrag_jax.systems.rlvr_scoring import open_player
from qrag_jax.systems.saved_token_run import CHECKPOINTS, FIRST, Weights

EXAMPLE = "configs/rlvr.py:smol"
WRITERS = leret_config.NAME, deepretrieval_config.NAME
SYSTEMS = rlvr_config.NAME, *WRITERS
SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to ask, 0 for all.", lower_bound=0)
SAMPLED = flags.DEFINE_integer(
    "sampled",
    0,
    "Episodes drawn for each question; 0: one, as config.eval.greedy says.",
    lower_bound=0,
)
QUESTIONS = flags.DEFINE_string(
    "questions",
    None,
    "Questions: bridge, or path,config,split;…; default config.questions.dev. Of DeepRetrieval: "
    "file of queries, .txt, .json or .jsonl; default config.queries.test.",
)
RETRIEVER = flags.DEFINE_string("retriever", None, "Default config.tools.retriever.")
PREFERENCES = flags.DEFINE_string(
    "preferences", None, "Of LeReT: file of the pairs of --iteration, NAME.jsonl; plays nothing."
)
ITERATION = flags.DEFINE_integer("iteration", None, "Of LeReT: see --preferences.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "File to write, or to go on with: NAME.jsonl.")
RESTART = flags.DEFINE_bool("restart", False, "Throw the file away instead of going on with it.")


def define_flags(argv: Sequence[str]) -> None:
    """Defines the flags of the experiment, or of the run that is named."""
    given = {word.lstrip("-").partition("=")[0] for word in argv if word.startswith("-")}
    if "workdir" in given:
        if "config" in given:
            raise InputError(
                "--workdir has a config of its own; leave out --config=FILE, and change fields "
                "with --config.FIELD=VALUE."
            )
        run_flags.define(argv, SYSTEMS, CHECKPOINTS)
        return
    run_flags.define_experiment()
    flags.DEFINE_string("workdir", None, "Folder of a trained run, in place of --config.")
    flags.DEFINE_enum("checkpoint", FIRST, [*CHECKPOINTS], "Which of the run's checkpoints.")


def main() -> int:
    """Reads the flags, plays the questions and says where the episodes are."""
    workdir = Path(flags.FLAGS.workdir) if flags.FLAGS.workdir else None
    config = _config(workdir)
    if OUT.value and Path(OUT.value).suffix != ".jsonl":
        raise InputError(f"--out={OUT.value} is not named as JSON lines; give a name.jsonl.")
    if workdir and config.system == leret_config.NAME:
        return _query_writer(workdir, config)
    if workdir and config.system == deepretrieval_config.NAME:
        return _rewriter(workdir, config)
    folder = workdir or _own_folder(Path(str(OUT.value)))
    retriever = config.tools.retriever
    with (
        commandline.writing(OUT.value or folder, "--out"),
        open_player(config, workdir, folder) as player,
    ):
        weights = player.weights(run_flags.checkpoint())
        if weights is None:
            raise _no_imitation(workdir)
        out = Path(OUT.value) if OUT.value else _default_out(folder, weights, retriever)
        asked, draws = len(player.system.inputs.dev), SAMPLED.value or 1
        status = _played(
            out,
            lambda: player.predict(weights, out, retriever, SAMPLED.value, restart=RESTART.value),
        )
        if status:
            return status
    print(f"{asked * draws} episodes of {asked} questions, {weights.told}: {out}")
    return 0


def _query_writer(workdir: Path, config: ConfigDict) -> int:
    """The same for a run of LeReT."""
    if (PREFERENCES.value is None) != (ITERATION.value is None):
        raise InputError("--preferences=FILE and --iteration=N go together; give both.")
    if PREFERENCES.value:
        return _preferences(workdir, config, Path(PREFERENCES.value), ITERATION.value or 1)
    pool = pool_beside(workdir, config, Path(OUT.value) if OUT.value else None)
    with (
        commandline.writing(OUT.value or workdir, "--out"),
        open_hop_predictor(config, workdir, pool=pool) as predictor,
    ):
        weights = predictor.weights(run_flags.checkpoint())
        if weights is None:
            raise _no_imitation(workdir)
        out = Path(OUT.value or workdir / "predictions" / f"{weights.name}.jsonl")
        asked = len(predictor.system.inputs.dev)

        if status := _played(out, lambda: predictor.predict(weights, out, restart=RESTART.value)):
            return status
    print(f"{asked} questions hop by hop, {weights.told}: {out}")
    return 0


def _rewriter(workdir: Path, config: ConfigDict) -> int:
    """The same for a run of DeepRetrieval."""
    queries = Path(QUESTIONS.value).expanduser() if QUESTIONS.value else None
    given = Path(OUT.value) if OUT.value else None
    search = search_beside(workdir, config, queries, given)
    with (
        commandline.writing(given or workdir, "--out"),
        open_rewriter(
            config, workdir, queries=queries, samples=SAMPLES.value, search=search
        ) as rewriter,
    ):
        weights = rewriter.weights(run_flags.checkpoint())
        if weights is None:
            raise _no_imitation(workdir)
        out = given or workdir / "predictions" / f"{weights.name}.jsonl"
        rows: list[RewriteRow] = []

        def play() -> None:
            rows.extend(rewriter.predict(weights, out, restart=RESTART.value))

        if status := _played(out, play):
            return status
    print(f"{len(rows)} queries rewritten, {weights.told}: {out}")
    for line in rewritten_lines(rows):
        print(line)
    return 0


def _preferences(workdir: Path, config: ConfigDict, path: Path, iteration: int) -> int:
    with (
        commandline.writing(path, "--preferences"),
        open_hop_predictor(config, workdir, trains=True) as predictor,
    ):
        pairs, states, others = write_pairs(predictor.system, iteration, path)
    print(
        f"{pairs} pairs of {states} states of iteration {iteration}: {path}; {others} states have "
        "none"
    )
    return 0


def _played(out: Path, play: Callable[[], object]) -> int:
    """Plays; the exit status."""
    try:
        play()
    except Stopped as stopped:
        print(f"{stopped}: stopped, {out} is kept; give the same command to go on.")
        return 128 + signal.Signals[str(stopped)]
    except FeedbackLost as error:
        reason = str(error).rstrip(".")
        print(f"error: {reason}. Give the same command to go on.", file=sys.stderr)
        return 1
    return 0


def _no_imitation(workdir: Path | None) -> InputError:
    return InputError(
        f"{workdir} keeps no checkpoint of the end of imitation; give --checkpoint=best, last or "
        "first."
    )


def _config(workdir: Path | None) -> ConfigDict:
    """The config, with the questions and the retriever of the command line."""
    if workdir:
        config = flags.FLAGS.config
    else:
        config = run_flags.given_experiment(flags.FLAGS["config"], EXAMPLE)
        if flags.FLAGS["checkpoint"].present:
            raise InputError("--checkpoint is of a run; give its folder with --workdir.")
        if not OUT.value:
            raise InputError("give the file to write, for example --out=predictions.jsonl.")
    system = config.get("system")
    if not workdir and system in WRITERS:
        raise InputError(
            f"--config is an experiment of {system}, of which runs alone predict, since they have "
            "what is searched; give --workdir, and --checkpoint=first for the untrained model."
        )
    if system not in SYSTEMS:
        raise InputError(
            f"--config is an experiment of {system}, whose policy is no language model; give one "
            f"of {rlvr_config.NAME}, for example --config={EXAMPLE}."
        )
    if system in WRITERS and (SAMPLED.value or RETRIEVER.value):
        raise InputError(f"--sampled and --retriever are for runs of {rlvr_config.NAME}.")
    if system != leret_config.NAME and (PREFERENCES.value or ITERATION.value):
        raise InputError(f"--preferences and --iteration are for runs of {leret_config.NAME}.")
    config = config.copy_and_resolve_references()
    config.eval.samples = SAMPLES.value
    if system in (rlvr_config.NAME, leret_config.NAME):
        config.eval.part = ALL
    if QUESTIONS.value and system != deepretrieval_config.NAME:
        config.questions.dev = QUESTIONS.value
    if RETRIEVER.value and system == rlvr_config.NAME:
        config.tools.retriever = RETRIEVER.value
    return config


def _own_folder(out: Path) -> Path:
    """Where a tiny model is made that no run has; one of an earlier file is deleted."""
    folder = out.with_suffix(".files")
    if RESTART.value or not out.exists():
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return folder


def _default_out(workdir: Path, weights: Weights, retriever: str) -> Path:
    return workdir / "predictions" / f"{weights.name}-{retriever}.jsonl"


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
