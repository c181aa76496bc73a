"""Finds the training questions whose reward varies between several episodes of an agent.

    python -m qrag_jax.filter_data --config=configs/harr_grpo.py:tiny --out=varied.jsonl

Every training question is played --rollouts times by the experiment's first encoder, or by a
checkpoint of the run --workdir, whose config is then used. All are in --out, with the mean and the
standard deviation of their rewards. Training learns from those that are kept, with
`--config.questions.kept=varied.jsonl`. Give the same command again to go on after a stop. (To cut
the chunks in a log of retrievals: `qrag evaluate --log`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.metrics.rows import RewardRow
from qrag_jax.metrics.summaries import reward_lines
from qrag_jax.runtime import commandline
from qrag_jax.runtime.whole_files import writing
from qrag_jax.systems import harr_config, run_flags
from qrag_jax.systems.harr_scoring import filter_questions
from qrag_jax.systems.scoring import resumable

EXAMPLE = "configs/harr_grpo.py:tiny"
OUT = flags.DEFINE_string("out", None, "File to write, or to go on with: NAME.jsonl.")
ROLLOUTS = flags.DEFINE_integer("rollouts", 8, "Episodes of each question.", lower_bound=2)
LEAST_STD = flags.DEFINE_float(
    "least_std",
    0.0,
    "Keep questions whose rewards have a greater standard deviation.",
    lower_bound=0.0,
)
RESTART = flags.DEFINE_bool("restart", False, "Throw --out away instead of going on with it.")


def define_flags(argv: Sequence[str]) -> None:
    """Defines the flags of the experiment, or of the run that is named."""
    run_flags.define_experiment_or_run(argv, (harr_config.NAME,))


def main() -> int:
    """Reads the flags, plays the questions and prints what is kept."""
    workdir, config = run_flags.experiment_or_run(EXAMPLE)
    if config.get("system") != harr_config.NAME:
        raise InputError(
            f"--config is an experiment of {config.get('system')}, which has no agent; give one of "
            f"{harr_config.NAME}, for example --config={EXAMPLE}."
        )
    out = Path(OUT.value or "")
    if out.suffix != ".jsonl":
        raise InputError(f"--out={out}: give the file to write, for example --out=varied.jsonl.")
    rows: list[RewardRow] = []

    def play() -> None:
        rows.extend(
            filter_questions(
                config,
                out,
                rollouts=ROLLOUTS.value,
                least_std=LEAST_STD.value,
                workdir=workdir,
                checkpoint=flags.FLAGS.checkpoint,
                restart=RESTART.value,
            )
        )

    with writing(out, "--out"):
        status = resumable(play, str(out))
    if status:
        return status
    print("\n".join([*reward_lines(rows, LEAST_STD.value), f"rewards: {out}"]))
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
