"""Writes a run's two towers as sentence-transformers models.

    python -m qrag_jax.export --workdir=RUN --out=FOLDER

FOLDER/state embeds states (the question and the chunks taken so far), FOLDER/chunk embeds chunks.
Both give the same vectors as in training. README.md says how the towers were trained and how to use
them. For a run with LoRA, both have the adapters merged in; FOLDER/adapter-state and
FOLDER/adapter-chunk hold the adapters alone, in PEFT's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline
from qrag_jax.systems import run_flags
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.towers_export import export


def define_flags(argv: Sequence[str]) -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("out", None, "Folder to write; new or empty.")
    run_flags.define(argv)


def main() -> int:
    """Reads the flags and exports."""
    if not flags.FLAGS.out:
        raise InputError("give the folder to write, for example --out=exported.")
    out = Path(flags.FLAGS.out).expanduser()
    run = SavedRun.open(run_flags.workdir(), flags.FLAGS.config)
    if not run_flags.checkpoint_is_given() and run.best_is_untrained():
        raise InputError(
            f"the best checkpoint of {run.workdir} is that of step 0, the untrained weights; give "
            "--checkpoint=last for the trained ones, or --checkpoint=best for these."
        )
    with commandline.writing(out, "--out"):
        export(run, run_flags.checkpoint(), out)
    print("\n".join(str(path) for path in sorted(out.iterdir(), key=lambda p: (p.is_file(), p))))
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
