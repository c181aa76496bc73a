"""Writes the models of a run: Q-RAG's two towers, or the language model of another system.

    qrag export --workdir=RUN --out=FOLDER

Of a run of Q-RAG, these are models of sentence-transformers: FOLDER/state embeds states (the
question and the chunks taken so far), FOLDER/chunk embeds chunks. README.md says how they were
trained and how to use them. FOLDER/retriever.json holds all other settings that a search needs.

Of a run of RLVR, LeReT or DeepRetrieval, FOLDER is the trained language model, as transformers
reads it. A critic is not exported. Adapters are merged in, and also next to it, in PEFT's format.

With --system=FILE.py, a system of your own writes FOLDER by its own `export`.
`hf upload OWNER/NAME FOLDER` puts the folder on the hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.learners.config import NONE
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.models.first_language_model import prepare_language_model, save_language_model
from qrag_jax.models.pretrained import CAUSAL_LM, write_adapters
from qrag_jax.runtime import commandline, config_fields, platform, run, whole_files
from qrag_jax.runtime.mesh import shardings_of
from qrag_jax.systems import run_flags, scoring, token_system
from qrag_jax.systems.config import ADAPTER, CARD, TEMPLATES, without_folders

_PRIVATE = ("engine.email", "engine.url", "llm.url", "reranker.url")  # not on a card
_PARTS = ("scores", "collections")  # of a summary


def define_flags(argv: Sequence[str]) -> None:
    flags.DEFINE_string("out", None, "Folder to write; new or empty.")
    run_flags.define(argv, "export", plays=False, outside=True)


def main() -> int:
    if not flags.FLAGS.out:
        raise InputError("give the folder to write, for example --out=exported.")
    out = Path(flags.FLAGS.out).expanduser()
    workdir, config, which = flags.FLAGS.workdir, flags.FLAGS.config, run_flags.given_checkpoint()
    kind = systems.kind(config)
    with whole_files.writing(out, "--out"):
        if issubclass(kind, token_system.TokenSystem):
            export_language_model(kind, Path(workdir), config, which or "best", out)
        else:
            kind.export_run(Path(workdir), config, which, out)
    print("\n".join(str(path) for path in sorted(out.iterdir(), key=lambda p: (p.is_file(), p))))
    return 0


def export_language_model(
    kind: type[token_system.TokenSystem[Any]], workdir: Path, raw: ConfigDict, which: str, out: Path
) -> None:
    """Writes a checkpoint's model, its adapters if it has any, and the model card."""
    whole_files.check_is_free(out)
    config = kind.SETTINGS.of(raw)
    mesh = scoring.mesh_of_run(config, workdir)
    # Without the run's data; a state holds more than the policy's parameters, which alone are read.
    model = prepare_language_model(
        config.model, workdir, tuple, config.seed, platform=platform.Platform.of(mesh)
    )
    rules = model.trunk.partition_rules()
    shardings = shardings_of(mesh, rules, model.trained)
    trained, step = scoring.saved_params(workdir, which, model.trained, shardings)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), trained)
    if not step:
        run.log(
            f"the {which} checkpoint is of step 0, so this is the model as it was before training; "
            "--checkpoint=last exports the newest one"
        )
    written = language_model_card(kind, workdir, raw, f"{which} checkpoint of step {step}")
    sizes, whole = config.model.lora.sizes, params
    if sizes is not None:
        whole = folded(Adapted(model.params, params), sizes.scale)
    with whole_files.whole_folder(out) as building:
        save_language_model(model, whole, model.folder, building)
        if sizes is not None:
            write_adapters(building / ADAPTER, model.table, sizes, params, task=CAUSAL_LM)
        (building / CARD).write_text(written, encoding="utf-8")


def language_model_card(
    kind: type[token_system.TokenSystem[Any]], workdir: Path, raw: ConfigDict, checkpoint: str
) -> str:
    """The card of a language model; it names no folder of the training machine."""
    from huggingface_hub import ModelCard, ModelCardData

    fields = without_folders(raw.to_dict())
    for name in _PRIVATE:
        section, _, field = name.partition(".")
        fields.get(section, {}).pop(field, None)
    path = workdir / "eval" / scoring.SUMMARY
    scores = dict(_scores(config_fields.read_fields(path), checkpoint)) if path.exists() else {}
    written = ModelCard.from_template(
        ModelCardData(
            library_name="transformers", pipeline_tag="text-generation", tags=["qrag_jax"]
        ),
        template_path=str(TEMPLATES / "language_model.md"),
        name=workdir.resolve().name,
        learned=kind.LEARNED,
        title=kind.TITLE,
        checkpoint=checkpoint,
        base=fields["model"]["path"] or "a tiny decoder, made for the run",
        critic=fields.get("algorithm") == "ppo" and fields["ppo"]["critic"] != NONE,
        scores=scores,
        fields=json.dumps(fields, indent=2),
    )
    return str(written)


def _scores(
    tree: Mapping[str, Any], checkpoint: str, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, float]]]:
    """Where a summary scores the checkpoint (a retriever, a collection): metric → mean."""
    for name, value in tree.items():
        if name == checkpoint and isinstance(value, Mapping):
            scored = value.get("all", value)  # of groups of questions
            means = {n: x["mean"] for n, x in scored.items() if isinstance(x, Mapping)}
            if means and "scores" in path:
                yield ", ".join(part for part in path if part not in _PARTS) or "all", means
        elif isinstance(value, Mapping):
            yield from _scores(value, checkpoint, (*path, name))


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
