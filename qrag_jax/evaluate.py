"""Scores a trained retriever: python -m qrag_jax.evaluate --workdir=runs/hotpotqa

Any field of the run's config can be overridden, for example
`--config.data.path=FOLDER --out=OTHER` to score other data. Priority: command line, then the file
given by `--eval_config`, then the run's saved config.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from qrag_jax.runtime import commandline
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems import older_runs, run_flags
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.scoring import ScoreOptions, check_own_data, score_run

SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to score, 0 for all.", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "Folder of logs and summaries; default WORKDIR/eval.")
RESTART = flags.DEFINE_bool("restart", False, "Throw partial logs away instead of resuming them.")


def main() -> int:
    """Reads the flags and scores."""
    workdir, config = run_flags.workdir(), flags.FLAGS.config
    saved = older_runs.load_config(workdir / CONFIG_NAME)
    if not OUT.value:
        check_own_data(workdir, saved, config)
    options = ScoreOptions(
        checkpoint=run_flags.checkpoint(),
        hold_out=(config.data.path, config.eval.path) == (saved.data.path, saved.eval.path),
        samples=SAMPLES.value,
        out=Path(OUT.value) if OUT.value else None,
        restart=RESTART.value,
    )
    with commandline.writing(OUT.value or workdir / "eval", "--out"):
        score_run(SavedRun.open(workdir, config), options)
    return 0


if __name__ == "__main__":
    commandline.run(main, define=run_flags.define)
