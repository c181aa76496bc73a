"""Tunes when the retriever stops: a threshold on Q.

    python -m qrag_jax.tune_stopping --log=HELD_OUT_LOG --test=OTHER_LOG

The threshold is tuned on one retrieval log. Its scores on both logs are reported beside every fixed
budget, the full budget and the oracle `early_stop`. Without `--test` a hash of the ids splits the
log into two halves: one to tune on, one to report on. Writes `stopping.json` and `stopping.png`.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.metrics.stopping import OBJECTIVES, StoppingOptions, tune
from qrag_jax.runtime import commandline

LOG = flags.DEFINE_string("log", None, "Retrieval log to tune the threshold on (held out).")
TEST = flags.DEFINE_string("test", None, "Log to report on; default: half of the held-out one.")
OUT = flags.DEFINE_string("out", None, "Folder of stopping.json and .png; default: the log's.")
BUDGETS = flags.DEFINE_list("budgets", None, "Fixed budgets to compare with; default 1,2,…,all.")
OBJECTIVE = flags.DEFINE_enum(
    "objective", "fact_f1", OBJECTIVES, "What the threshold and budget maximise."
)


def main() -> int:
    """Reads the flags and tunes."""
    if not LOG.value:
        raise InputError("give the held-out log, for example --log=runs/x/eval/best-1/eval.jsonl.")
    options = StoppingOptions(
        log=Path(LOG.value),
        test=Path(TEST.value) if TEST.value else None,
        out=Path(OUT.value) if OUT.value else None,
        budgets=BUDGETS.value,
        objective=OBJECTIVE.value,
    )
    tune(options)
    return 0


if __name__ == "__main__":
    commandline.run(main)
