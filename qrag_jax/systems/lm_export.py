"""Exports a trained language model as a Hugging Face folder, with its adapters and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from qrag_jax.runtime.whole_files import check_is_free, whole_folder, write_whole
from qrag_jax.systems.rlvr_config import RlvrConfig
from qrag_jax.systems.rlvr_stages import stages_of
from qrag_jax.systems.shown_paths import without_folders

CARD, ADAPTER = "README.md", "adapter"
_SUMMARY = Path("eval") / "summary.json"
_SHOWN = ("em", "f1", "recall", "citation", "reward")


def export_language_model(workdir: Path, given: ConfigDict, which: str, out: Path) -> None:
    """Writes a checkpoint's model, its adapters if it has any, and the model card.

    The model in `out` has the adapters merged in; `out/adapter` holds them alone, in PEFT's format.

    Args:
        which: "best" or "last".
        out: a new or empty folder.

    Raises:
        InputError: `out` is not an empty folder, or there is no such checkpoint.
    """
    check_is_free(out)
    config = RlvrConfig.of(given)
    model = _model(config, workdir)
    params, step = _trained(config, model, workdir, which)
    card = _card(workdir, given, f"{which} checkpoint of step {step}")
    sizes, whole = config.model.lora.sizes, params
    if sizes is not None:
        whole = merge(Adapted(model.loaded.params, params), sizes.scale)
    with whole_folder(out) as building:
        save_language_model(model.loaded, whole, model.folder, building)
        if sizes is not None:
            table = table_of(model.loaded.model_config["model_type"])
            write_adapters(building / ADAPTER, table, sizes, params, task=CAUSAL_LM)
        write_whole(building / CARD, card)


def _model(config: RlvrConfig, workdir: Path) -> FirstLanguageModel:
    """The model that training started from, without the run's data."""
    if not config.model.path and not (workdir / FOLDER).exists():
        raise InputError(f"{workdir} holds no model; --workdir must be a run that was trained.")
    platform = Platform.of(make_mesh(config.runtime.mesh))
    return prepare_language_model(config.model, workdir, tuple, config.seed, platform=platform)


def _trained(
    config: RlvrConfig, model: FirstLanguageModel, workdir: Path, which: str
) -> tuple[Params, int]:
    """What was trained, on the host, and the step of the checkpoint."""
    (stage, *_) = stages_of(config, make_mesh(config.runtime.mesh), model)
    template = placement.shapes_on(model.trained, stage.policy.shardings.params)
    params, step = Checkpoints(workdir, read_only=True).restore_params(which, template)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params), step


def _card(workdir: Path, given: ConfigDict, checkpoint: str) -> str:
    """What the model is, how it scored, and how it is used."""
    base = without_folders(given.model.path) or "a tiny decoder, made for the run"
    lines = [
        f"# {workdir.resolve().name}",
        "",
        f"A language model that learned to search with tools by qrag_jax (RLVR): {checkpoint}. It "
        f"started from {base}. It is an ordinary causal model of transformers, and "
        f"`{ADAPTER}`, if it is here, holds its adapters alone, in PEFT's format.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model, tokenizer = (kind.from_pretrained("FOLDER") for kind in '
        "(AutoModelForCausalLM, AutoTokenizer))",
        "```",
        "",
        f"Its prompt is `config.tools.prompt={given.tools.prompt}`, its calls are written as "
        f"`config.tools.form={given.tools.form}`, and it was trained on "
        f"`{without_folders(given.questions.train)}`.",
        "",
        *_scores(workdir, checkpoint),
        "## Config",
        "",
        "```json",
        json.dumps(without_folders(given.to_dict()), indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)


def _scores(workdir: Path, checkpoint: str) -> list[str]:
    """The scores of this checkpoint, if the run was scored."""
    try:
        summary = json.loads((workdir / _SUMMARY).read_bytes())
        by_retriever: Mapping[str, Mapping[str, Any]] = summary["scores"]
        rows = []
        for retriever, weights in by_retriever.items():
            if checkpoint in weights:
                every = weights[checkpoint]["all"]
                cells = " | ".join(f"{every[name]['mean']:.3f}" for name in _SHOWN)
                rows.append(f"| {retriever} | {cells} |")
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{workdir / _SUMMARY} is not a summary of qrag_jax.evaluate ({error}); score the run "
            "again, or delete it."
        ) from None
    if not rows:
        return []
    head = ["| retriever | " + " | ".join(_SHOWN) + " |", "|---" * (len(_SHOWN) + 1) + "|"]
    return ["## Scores", "", *head, *rows, ""]
