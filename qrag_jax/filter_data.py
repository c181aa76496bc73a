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
from qrag_jax.systems import harr_config, run_flags
from qrag_jax.systems.harr_scoring import FilterOptions, filter_questions
from qrag_jax.systems.scoring import resumable

EXAMPLE = "configs/harr_grpo.py:tiny"
OUT = flags.DEFINE_string("out", None, "File to write, or to go on with: NAME.jsonl.")
ROLLOUTS = flags.DEFINE_integer("rollouts", 8, "Episodes of each question.")
LEAST_STD = flags.DEFINE_float(
    "least_std", 0.0, "Keep questions whose rewards have a greater standard deviation."
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
    if not OUT.value:
        raise InputError("give the file to write, for example --out=varied.jsonl.")
    options = FilterOptions(
        out=Path(OUT.value),
        rollouts=ROLLOUTS.value,
        least_std=LEAST_STD.value,
        workdir=workdir,
        checkpoint=flags.FLAGS.checkpoint,
        restart=RESTART.value,
    )
    rows: list[RewardRow] = []
    with commandline.writing(options.out, "--out"):
        status = resumable(lambda: rows.extend(filter_questions(config, options)), str(options.out))
    if status:
        return status
    print("\n".join([*reward_lines(rows, options.least_std), f"rewards: {options.out}"]))
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
