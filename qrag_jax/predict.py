"""Lets a language model answer questions with tools, and writes every episode token by token.

    python -m qrag_jax.predict --workdir=runs/rlvr-quick
    python -m qrag_jax.predict --config=configs/rlvr.py:smol --out=untrained.jsonl

The file has one JSON line for each question and draw: the ids that were observed and sampled with
their log-probabilities, the text of each turn, the parts of the reward and the reward. Give the
same command again to go on after a stop. `qrag evaluate` scores a run, `qrag analyze` shows files.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.runtime import commandline
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems import rlvr_config, run_flags
from qrag_jax.systems.rlvr_predict import (
    CHECKPOINTS,
    FIRST,
    PredictOptions,
    Weights,
    open_player,
)

EXAMPLE = "configs/rlvr.py:smol"
SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to ask, 0 for all.", lower_bound=0)
SAMPLED = flags.DEFINE_integer(
    "sampled",
    0,
    "Episodes drawn for each question; 0: one, as config.eval.greedy says.",
    lower_bound=0,
)
QUESTIONS = flags.DEFINE_string(
    "questions", None, "Questions: bridge, or path,config,split;…; default config.questions.dev."
)
RETRIEVER = flags.DEFINE_string("retriever", None, "Default config.tools.retriever.")
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
        run_flags.define(argv, (rlvr_config.NAME,), CHECKPOINTS)
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
    folder = workdir or _own_folder(Path(str(OUT.value)))
    options = PredictOptions(sampled=SAMPLED.value, restart=RESTART.value)
    retriever = config.tools.retriever
    with (
        commandline.writing(OUT.value or folder, "--out"),
        open_player(config, workdir, folder) as player,
    ):
        weights = player.weights(run_flags.checkpoint())
        if weights is None:
            raise InputError(
                f"{workdir} keeps no checkpoint of the end of imitation; give --checkpoint=best, "
                "last or first."
            )
        out = Path(OUT.value) if OUT.value else _default_out(folder, weights, retriever)
        try:
            player.predict(weights, out, retriever=retriever, options=options)
        except Stopped as stopped:
            print(f"{stopped}: stopped, {out} is kept; give the same command to go on.")
            return 128 + signal.Signals[str(stopped)]
        except FeedbackLost as error:
            reason = str(error).rstrip(".")
            print(f"error: {reason}. Give the same command to go on.", file=sys.stderr)
            return 1
        draws = options.sampled or 1
        episodes = draws * len(player.system.inputs.dev)
    print(f"{episodes} episodes of {episodes // draws} questions, {weights.told}: {out}")
    return 0


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
    if config.get("system") != rlvr_config.NAME:
        raise InputError(
            f"--config is an experiment of {config.get('system')}, whose policy is no language "
            f"model; give one of {rlvr_config.NAME}, for example --config={EXAMPLE}."
        )
    config = config.copy_and_resolve_references()
    config.eval.samples = SAMPLES.value
    if QUESTIONS.value:
        config.questions.dev = QUESTIONS.value
    if RETRIEVER.value:
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
