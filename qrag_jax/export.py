"""Writes the models of a run: Q-RAG's two towers, or the language model of another system.

    python -m qrag_jax.export --workdir=RUN --out=FOLDER

Of a run of Q-RAG, these are models of sentence-transformers: FOLDER/state embeds states (the
question and the chunks taken so far), FOLDER/chunk embeds chunks. README.md says how they were
trained and how to use them. FOLDER/retriever.json holds all other settings that a search needs.

Of a run of RLVR, LeReT or DeepRetrieval, FOLDER is the trained language model, as transformers
reads it. A critic is not exported. Adapters are merged in, and also beside it, in PEFT's format.

With --system=FILE.py, a system of your own writes FOLDER by its own `export`.
`hf upload OWNER/NAME FOLDER` puts the folder on the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline
from qrag_jax.runtime.whole_files import writing
from qrag_jax.systems import run_flags
from qrag_jax.systems.exports import EXPORTED, export_language_model
from qrag_jax.systems.saved_run import SavedRun, export


def define_flags(argv: Sequence[str]) -> None:
    flags.DEFINE_string("out", None, "Folder to write; new or empty.")
    run_flags.define(argv, (run_flags.Q_RAG, *EXPORTED), plays=False, outside=True)


def main() -> int:
    if not flags.FLAGS.out:
        raise InputError("give the folder to write, for example --out=exported.")
    out = Path(flags.FLAGS.out).expanduser()
    workdir, config = Path(flags.FLAGS.workdir), flags.FLAGS.config
    which = flags.FLAGS.checkpoint
    with writing(out, "--out"):
        if config.get("system") in EXPORTED:
            export_language_model(workdir, config, which, out)
        elif config.get("system", run_flags.Q_RAG) != run_flags.Q_RAG:
            with systems.saved_system(workdir, config, which) as (system, state, _):
                if not hasattr(system, "export"):
                    raise InputError(f"the system {config.system!r} has no export(state, out).")
                out.mkdir(parents=True, exist_ok=True)
                system.export(state, out)
        else:
            run = SavedRun.open(workdir, config)
            export(run, run.chosen(run_flags.given_checkpoint()), out)
    print("\n".join(str(path) for path in sorted(out.iterdir(), key=lambda p: (p.is_file(), p))))
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
