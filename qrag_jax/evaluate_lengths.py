"""Scores a run on documents of several lengths, without training it again.

    python -m qrag_jax.evaluate_lengths --workdir=RUN --chunks=50,160,1200,4600,40000

Every length asks the same questions: those of the stories that fit the shortest length. With
`--every_story` each length asks about all stories that fit it. One table and one plot show
accuracy, seconds and peak memory for each length. Fields of the run's config can be overridden,
for example `--config.eval.beam=4`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline
from qrag_jax.systems import run_flags
from qrag_jax.systems.q_rag_scoring import score_lengths
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.scoring import ScoreOptions

CHUNKS = flags.DEFINE_list(
    "chunks", ["50", "160", "1200", "4600"], "Lengths of documents, in chunks."
)
SAMPLES = flags.DEFINE_list("samples", ["100"], "Documents of each length; the last goes on.")
EMBEDDINGS = flags.DEFINE_string(
    "embeddings",
    None,
    "Folder that keeps embeddings of chunks; on a CPU their table is mapped from its disk.",
)
EVERY_STORY = flags.DEFINE_bool(
    "every_story", False, "At each length all stories that fit it, not those that fit the shortest."
)
OUT = flags.DEFINE_string("out", None, "Folder of logs, table and plot; default WORKDIR/lengths.")
RESTART = flags.DEFINE_bool("restart", False, "Throw partial logs away instead of resuming them.")


def _counts(name: str, words: Sequence[str]) -> list[int]:
    try:
        counts = [int(word.replace("_", "")) for word in words]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InputError(f"--{name}={','.join(words)}: give counts from 1 up, with commas between.")
    return counts


def main() -> int:
    """Reads the flags and scores."""
    chunks, counts = _counts("chunks", CHUNKS.value), _counts("samples", SAMPLES.value)
    if len(counts) > len(chunks):
        raise InputError(
            f"--samples={','.join(SAMPLES.value)} has more counts than --chunks has lengths; give "
            "one for each length, or one for all."
        )
    counts += counts[-1:] * (len(chunks) - len(counts))
    samples = dict(sorted(zip(chunks, counts, strict=True)))
    run = SavedRun.open(run_flags.workdir(), flags.FLAGS.config)
    options = ScoreOptions(
        checkpoint=run_flags.checkpoint(),
        out=Path(OUT.value) if OUT.value else None,
        restart=RESTART.value,
    )
    with commandline.writing(OUT.value or run.workdir / "lengths", "--out"):
        score_lengths(
            run,
            options,
            samples,
            every_story=EVERY_STORY.value,
            embeddings=Path(EMBEDDINGS.value).expanduser() if EMBEDDINGS.value else None,
        )
    return 0


if __name__ == "__main__":
    commandline.run(main, define=run_flags.define)
