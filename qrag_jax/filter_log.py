"""Writes a copy of a retrieval log in which a filter has chosen the chunks of each row.

    python -m qrag_jax.filter_log --log=LOG --filter=NAME --out=NEW.jsonl

`--filter=qvalue` needs `--threshold`, `--filter=retrieval_step` needs `--steps`. The old log is not
changed. (To choose training questions: `qrag filter_data`.)
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.metrics.bootstrap import columns_text, interval_cells, with_intervals
from qrag_jax.metrics.chunk_filters import FILTERS, chunk_filter
from qrag_jax.metrics.facts import fact_columns
from qrag_jax.metrics.row_log import begin, read_record, record_path
from qrag_jax.metrics.rows import RETRIEVALS, read_retrievals
from qrag_jax.runtime import commandline
from qrag_jax.runtime.locks import log_locks

LOG = flags.DEFINE_string("log", None, "Retrieval log to read.")
OUT = flags.DEFINE_string("out", None, "Retrieval log to write; must not exist.")
FILTER = flags.DEFINE_string("filter", None, f"One of {', '.join(FILTERS)}.")
THRESHOLD = flags.DEFINE_float("threshold", None, "For qvalue: stop at the first Q <= this.")
STEPS = flags.DEFINE_integer("steps", None, "For retrieval_step: how many chunks to keep.")

COLUMNS = ("fact_f1", "fact_precision", "fact_recall", "fact_em", "steps")


def main() -> int:
    """Reads, filters, writes and prints the scores before and after."""
    if not (LOG.value and OUT.value and FILTER.value):
        raise InputError("give --log=LOG, --filter=NAME and --out=NEW.jsonl.")
    log, out = Path(LOG.value), Path(OUT.value)
    parameters = {"threshold": THRESHOLD.value, "steps": STEPS.value}
    keep = chunk_filter(FILTER.value, parameters)
    rows = read_retrievals(log)
    meta = read_record(log)
    kept = [keep(row) for row in rows]
    applied = {"name": FILTER.value} | {k: v for k, v in parameters.items() if v is not None}
    meta |= {"filtered_from": str(log), "filters": [*meta.get("filters", []), applied]}
    try:
        with log_locks(out):
            for path in (out, record_path(out)):
                if path.exists():
                    raise InputError(f"{path} exists already; delete it or give another --out")
            begin(out, meta)
            RETRIEVALS.append(out, kept)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror}); give another --out"
        ) from None
    lines = [["", *COLUMNS]]
    for name, shown in (("before", rows), ("after", kept)):
        scores = with_intervals(fact_columns(shown))
        lines.append([name, *interval_cells(scores, COLUMNS)])
    print("\n".join(columns_text(lines)))
    print(f"{len(kept)} rows: {out}")
    return 0


if __name__ == "__main__":
    commandline.run(main)
