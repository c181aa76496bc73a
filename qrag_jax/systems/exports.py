"""Exports the language model of a run, with its adapters and a model card (towers: `towers`).

It is a model of transformers. Adapters are merged in, and are beside it alone, in PEFT's format.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.learners import placement
from qrag_jax.learners.config import NONE
from qrag_jax.models.adapters import CAUSAL_LM, write_adapters
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.models.first_language_model import prepare_language_model
from qrag_jax.models.pretrained import save_language_model
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.mesh import shardings_of
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import log
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.runtime.whole_files import check_is_free, whole_folder
from qrag_jax.systems import SYSTEMS
from qrag_jax.systems.config import without_folders
from qrag_jax.systems.saved_run import ADAPTER, CARD, TEMPLATES
from qrag_jax.systems.scoring import SUMMARY, mesh_of_run
from qrag_jax.systems.token_config import TokenConfig

# Systems whose language models can be exported: their names for readers, and what models learn
EXPORTED = {
    "rlvr": ("RLVR", "search with tools"),
    "leret": ("LeReT", "write search queries, one at each hop"),
    "deepretrieval": ("DeepRetrieval", "rewrite search queries"),
}
_PRIVATE = ("engine.email", "engine.url", "llm.url")  # persons and addresses, not on a card


def export_language_model(workdir: Path, raw: ConfigDict, which: str, out: Path) -> None:
    """Writes a checkpoint's model, its adapters if it has any, and the model card.

    The model in `out` has the adapters merged in; `out/adapter` holds them alone, in PEFT's format.
    """
    check_is_free(out)
    layout: type[TokenConfig] = importlib.import_module(f"{SYSTEMS[raw.system]}_config").CONFIG
    config = layout.of(raw)
    mesh = mesh_of_run(config, workdir)
    # Without the run's data; a state holds more than the policy's parameters, which alone are read.
    model = prepare_language_model(
        config.model, workdir, tuple, config.seed, platform=Platform.of(mesh)
    )
    rules = config.runtime.rules(model.partition_rules)
    shardings = shardings_of(mesh, rules, model.trained, model.trained)
    template = placement.shapes_on(model.trained, shardings)
    trained, step = Checkpoints(workdir, read_only=True).restore_params(which, template)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), trained)
    if not step:
        log(
            f"the {which} checkpoint is of step 0, so this is the model as it was before training; "
            "--checkpoint=last exports the newest one"
        )
    written = language_model_card(workdir, raw, f"{which} checkpoint of step {step}")
    sizes, whole = config.model.lora.sizes, params
    if sizes is not None:
        whole = folded(Adapted(model.params, params), sizes.scale)
    with whole_folder(out) as building:
        save_language_model(model, whole, model.folder, building)
        if sizes is not None:
            write_adapters(building / ADAPTER, model.table, sizes, params, task=CAUSAL_LM)
        (building / CARD).write_text(written, encoding="utf-8")


def language_model_card(workdir: Path, raw: ConfigDict, checkpoint: str) -> str:
    """The card of a language model; it names no folder of the training machine."""
    from huggingface_hub import ModelCard, ModelCardData

    (title, learned), fields = EXPORTED[raw.system], without_folders(raw.to_dict())
    for name in _PRIVATE:
        section, _, field = name.partition(".")
        fields.get(section, {}).pop(field, None)
    path = workdir / "eval" / SUMMARY
    scores = dict(_scores(read_fields(path), checkpoint)) if path.exists() else {}
    written = ModelCard.from_template(
        ModelCardData(
            library_name="transformers", pipeline_tag="text-generation", tags=["qrag_jax"]
        ),
        template_path=str(TEMPLATES / "language_model.md"),
        name=workdir.resolve().name,
        learned=learned,
        title=title,
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


_PARTS = ("scores", "collections")  # of a summary
