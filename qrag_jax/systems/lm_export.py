"""Exports a trained language model as a Hugging Face folder, with its adapters and a model card."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.learners import placement
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.files.peft import CAUSAL_LM, write_adapters
from qrag_jax.models.first_language_model import FOLDER, FirstLanguageModel, prepare_language_model
from qrag_jax.models.pretrained_lm import save_language_model, table_of
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import log
from qrag_jax.runtime.sharding import shardings_of
from qrag_jax.runtime.whole_files import check_is_free, whole_folder, write_whole
from qrag_jax.systems.deepretrieval_scoring import DEEPRETRIEVAL
from qrag_jax.systems.leret_scoring import LERET
from qrag_jax.systems.lm_card import ADAPTER, language_model_card
from qrag_jax.systems.rlvr_scoring import RLVR
from qrag_jax.systems.token_config import TokenConfig

CARD = "README.md"
# config.system → what it says of its models.
EXPORTED = MappingProxyType({each.name: each for each in (RLVR, LERET, DEEPRETRIEVAL)})


def export_language_model(workdir: Path, given: ConfigDict, which: str, out: Path) -> None:
    """Writes a checkpoint's model, its adapters if it has any, and the model card.

    The model in `out` has the adapters merged in; `out/adapter` holds them alone, in PEFT's format.

    Args:
        given: the run's config, of one of the systems in `EXPORTED`.
        which: "best" or "last".
        out: a new or empty folder.
    """
    check_is_free(out)
    system = EXPORTED[given.system]
    config = system.read(given)
    model = _model(config, workdir)
    params, step = _trained(config, model, workdir, which)
    if not step:
        log(
            f"the {which} checkpoint is of step 0, so this is the model as it was before training; "
            "--checkpoint=last exports the newest one"
        )
    card = language_model_card(system, workdir, given, f"{which} checkpoint of step {step}")
    sizes, whole = config.model.lora.sizes, params
    if sizes is not None:
        whole = merge(Adapted(model.loaded.params, params), sizes.scale)
    with whole_folder(out) as building:
        save_language_model(model.loaded, whole, model.folder, building)
        if sizes is not None:
            table = table_of(model.loaded.model_config["model_type"])
            write_adapters(building / ADAPTER, table, sizes, params, task=CAUSAL_LM)
        write_whole(building / CARD, card)


def _model(config: TokenConfig, workdir: Path) -> FirstLanguageModel:
    """The model that training started from, without the run's data."""
    if not config.model.path and not (workdir / FOLDER / "config.json").exists():
        raise InputError(f"{workdir} holds no model; --workdir must be a run that was trained.")
    platform = Platform.of(make_mesh(config.runtime.mesh))
    return prepare_language_model(config.model, workdir, tuple, config.seed, platform=platform)


def _trained(
    config: TokenConfig, model: FirstLanguageModel, workdir: Path, which: str
) -> tuple[Params, int]:
    """What was trained, on the host, and the step of the checkpoint.

    A state holds more, such as a critic and the moments; only the policy's parameters are read.
    """
    mesh, rules = make_mesh(config.runtime.mesh), config.runtime.rules(model.partition_rules)
    shardings = shardings_of(mesh, rules, model.trained, model.trained)
    template = placement.shapes_on(model.trained, shardings)
    params, step = Checkpoints(workdir, read_only=True).restore_params(which, template)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params), step
