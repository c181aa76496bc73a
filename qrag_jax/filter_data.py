"""Finds the training questions whose reward varies between several episodes of an agent.

    qrag filter_data --config=configs/harr_grpo.py:tiny --out=varied.jsonl

Every training question is played --rollouts times by the experiment's first encoder, or by a
checkpoint of the run --workdir. All are in --out, with the mean and the standard deviation of their
rewards; `--config.questions.kept=varied.jsonl` trains on those that are kept. Give the same command
again to go on after a stop.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from qrag_jax import systems
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.learners.state import encoder_key
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.row_log import REWARDS, RewardRow, begin, refuse_other
from qrag_jax.metrics.summaries import judged, reward_lines, reward_row
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.runtime import commandline, config_fields, whole_files
from qrag_jax.systems import run_flags
from qrag_jax.systems.scoring import FIRST, Questions, ScoreOptions, Way, open_predictor, resumable

OUT = flags.DEFINE_string("out", None, "File to write, or to go on with: NAME.jsonl.")
ROLLOUTS = flags.DEFINE_integer("rollouts", 8, "Episodes of each question.", lower_bound=2)
LEAST_STD = flags.DEFINE_float(
    "least_std", 0.0, "Keep questions whose rewards have a greater standard deviation.", 0.0
)
RESTART = flags.DEFINE_bool("restart", False, "Throw --out away instead of going on with it.")

_FILTERED = 2**31 - 3  # in place of a step's number: no step has it, and no evaluation
# Sections of the config that a first policy's episodes do not depend on.
_OF_TRAINING = ("train.", "optimizer.", "grpo.", "ppo.", "algorithm", "eval.", "questions.")


def define_flags(argv: Sequence[str]) -> None:
    run_flags.define(argv, "filter_data", or_experiment=True)


def main() -> int:
    workdir, config = run_flags.experiment_or_run("filter_data")
    out = Path(OUT.value or "")
    if out.suffix != ".jsonl":
        raise InputError(f"--out={out}: give the file to write, for example --out=varied.jsonl.")
    with whole_files.writing(out, "--out"):
        status = resumable(lambda: _play(workdir, config, out), str(out))
    if not status:
        print("\n".join([*reward_lines(REWARDS.read(out), LEAST_STD.value), f"rewards: {out}"]))
    return status


def _play(workdir: Path | None, raw: ConfigDict, log: Path) -> None:
    """Plays all training questions that the log lacks.

    GRPO learns nothing from a question whose episodes all have the same reward. The draws of an
    episode depend on the number of its question and of its member alone.
    """
    count, least_std = ROLLOUTS.value, LEAST_STD.value
    config = (kind := systems.kind(raw)).SETTINGS.of(raw)
    folder = workdir or log.with_suffix(".files")  # of encoder and index
    free = (*config_fields.FREE_FIELDS, *kind.SETTINGS.FREE_FIELDS, *_OF_TRAINING)
    fields = {n: v for n, v in config_fields.flat(raw.to_dict()).items() if not n.startswith(free)}
    settings: dict[str, Any] = {"config": fields, "rollouts": count}
    if RESTART.value:
        log.unlink(missing_ok=True)
    others = refuse_other(log, settings)  # before anything is computed
    if others and not (workdir or log.exists()):
        # Encoder and index next to the log are of other settings.
        for name in (FOLDER, kind.INDEX):
            shutil.rmtree(folder / name, ignore_errors=True)
        begin(log, settings)
    with open_predictor(kind, raw, workdir, ScoreOptions(""), folder=folder) as player:
        system = player.system
        params = player.weights(flags.FLAGS.checkpoint if workdir else FIRST).params
        settings |= {
            "data": system.inputs.data,
            "weights": encoder_key((params, system.inputs.model.stored), {}),
            "answers depend on": system.provenance,
        }
        kept = REWARDS.read_partial(log)
        if (rows := [judged(row, least_std) for row in kept]) != kept:
            REWARDS.rewrite(log, rows)

        def play(part: Sequence[Sample], first: int) -> list[RewardRow]:
            stop, starts = player.stop, system.starts(part, count, _FILTERED, first)
            played = system.play(params, starts, stop)
            scores = iter(system.scores([g for g in part for _ in range(count)], played, stop))
            total, rows = config.reward.rewards.total, list[RewardRow]()
            for gold in part:
                tries = [next(scores) for _ in range(count)]
                rewards = [x.cause if isinstance(x, Failure) else total(x) for x in tries]
                rows.append(reward_row((gold.id, gold.question), rewards, least_std))
            return rows

        asked = Questions(REWARDS, system.inputs.train, max(1, kind.AT_ONCE // count))
        asked.into(log, Way(log.stem, "rewards", play, settings), player.stop, restart=False)


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
