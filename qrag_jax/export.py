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

    python -m qrag_jax.export --workdir=RUN --out=FOLDER --push=OWNER/NAME --private

also pushes FOLDER to the hub, with the token of HF_TOKEN or of `hf auth login`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.models.files.hub_push import HubTarget
from qrag_jax.runtime import commandline
from qrag_jax.systems import run_flags
from qrag_jax.systems.lm_export import EXPORTED, export_language_model
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.towers_export import export


def define_flags(argv: Sequence[str]) -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("out", None, "Folder to write; new or empty.")
    flags.DEFINE_string("push", None, "OWNER/NAME on the hub to push the folder to.")
    flags.DEFINE_bool("private", False, "With --push: only the owner may see it.")
    run_flags.define(argv, (run_flags.Q_RAG, *EXPORTED), plays=False)


def main() -> int:
    """Reads the flags and exports."""
    if not flags.FLAGS.out:
        raise InputError("give the folder to write, for example --out=exported.")
    out, name, private = Path(flags.FLAGS.out).expanduser(), flags.FLAGS.push, flags.FLAGS.private
    if private and name is None:
        raise InputError("--private is given without --push; give --push=OWNER/NAME, too.")
    target = None if name is None else HubTarget.of(name, private=private)
    workdir, config = run_flags.workdir(), flags.FLAGS.config
    if config.get("system") in EXPORTED:
        with commandline.writing(out, "--out"):
            export_language_model(workdir, config, run_flags.checkpoint(), out)
    else:
        run = SavedRun.open(workdir, config)
        which = run.chosen(run_flags.given_checkpoint())
        with commandline.writing(out, "--out"):
            export(run, which, out)
    print("\n".join(str(path) for path in sorted(out.iterdir(), key=lambda p: (p.is_file(), p))))
    if target is not None:
        message = f"{workdir.resolve().name}, exported by qrag_jax"
        print(f"pushed to {target.push(out, message)}")
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags, dry_run=True)
