"""Writes the models of a run: Q-RAG's two towers, or the language model of another system.

    python -m qrag_jax.export --workdir=RUN --out=FOLDER

Of a run of Q-RAG, these are models of sentence-transformers: FOLDER/state embeds states (the
question and the chunks taken so far), FOLDER/chunk embeds chunks. Both give the same vectors as in
training. README.md says how the towers were trained and how to use them. For a run with LoRA, both
have the adapters merged in; FOLDER/adapter-state and FOLDER/adapter-chunk hold the adapters alone,
in PEFT's format. FOLDER/retriever.json holds all other settings that a search needs.

Of a run of RLVR, LeReT or DeepRetrieval, FOLDER is the trained language model, as transformers
reads it, with its adapters merged in; FOLDER/adapter has these alone, in PEFT's format. Its
README.md says which prompt it wants. A critic is not exported.

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
from qrag_jax.systems.exports import EXPORTED, export, export_language_model
from qrag_jax.systems.saved_run import SavedRun


def define_flags(argv: Sequence[str]) -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("out", None, "Folder to write; new or empty.")
    run_flags.define(argv, (run_flags.Q_RAG, *EXPORTED), plays=False, outside=True)


def main() -> int:
    """Reads the flags and exports."""
    if not flags.FLAGS.out:
        raise InputError("give the folder to write, for example --out=exported.")
    out = Path(flags.FLAGS.out).expanduser()
    workdir, config = Path(flags.FLAGS.workdir), flags.FLAGS.config
    if config.get("system") in EXPORTED:
        with writing(out, "--out"):
            export_language_model(workdir, config, flags.FLAGS.checkpoint, out)
    elif config.get("system", run_flags.Q_RAG) != run_flags.Q_RAG:
        with systems.saved_system(workdir, config, flags.FLAGS.checkpoint) as (system, state, _):
            if not hasattr(system, "export"):
                raise InputError(f"the system {config.system!r} has no export(state, out).")
            with writing(out, "--out"):
                out.mkdir(parents=True, exist_ok=True)
                system.export(state, out)
    else:
        run = SavedRun.open(workdir, config)
        which = run.chosen(run_flags.given_checkpoint())
        with writing(out, "--out"):
            export(run, which, out)
    print("\n".join(str(path) for path in sorted(out.iterdir(), key=lambda p: (p.is_file(), p))))
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
