"""Finds the training questions whose reward varies between several episodes of an agent.

    python -m qrag_jax.filter_data --config=configs/harr_grpo.py:tiny --out=varied.jsonl

Every training question is played --rollouts times by the experiment's first encoder, or by a
checkpoint of the run --workdir. All are in --out, with the mean and the standard deviation of their
rewards; `--config.questions.kept=varied.jsonl` trains on those that are kept. Give the same command
again to go on after a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    run_flags.define(argv, (harr_config.NAME,), or_experiment=True)


def main() -> int:
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
    how: Any = {"workdir": workdir, "checkpoint": flags.FLAGS.checkpoint}
    how |= {flag.name: flag.value for flag in (ROLLOUTS, LEAST_STD, RESTART)}

    with writing(out, "--out"):
        status = resumable(lambda: rows.extend(filter_questions(config, out, **how)), str(out))
    if status:
        return status
    print("\n".join([*reward_lines(rows, LEAST_STD.value), f"rewards: {out}"]))
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
