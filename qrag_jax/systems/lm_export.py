"""Exports a trained language model as a Hugging Face folder, with its adapters and a model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.learners import placement
from qrag_jax.learners.config import NONE
from qrag_jax.metrics.summaries import SHOWN
from qrag_jax.models.adapters import CAUSAL_LM, write_adapters
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.first_language_model import prepare_language_model
from qrag_jax.models.pretrained_lm import save_language_model, table_of
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.mesh import shardings_of
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import check_is_free, whole_folder, write_whole
from qrag_jax.systems import deepretrieval_config, leret_config, rlvr_config
from qrag_jax.systems.saved_token_run import mesh_of_run
from qrag_jax.systems.scoring import SUMMARY
from qrag_jax.systems.token_config import TokenConfig
from qrag_jax.systems.towers_export import without_folders

CARD, ADAPTER = "README.md", "adapter"
Fields = Mapping[str, Any]  # of a config, by section
Scores = Mapping[str, Mapping[str, float]]  # row → metric → mean; all rows have the same metrics


def export_language_model(workdir: Path, given: ConfigDict, which: str, out: Path) -> None:
    """Writes a checkpoint's model, its adapters if it has any, and the model card.

    The model in `out` has the adapters merged in; `out/adapter` holds them alone, in PEFT's format.
    """
    check_is_free(out)
    config = EXPORTED[given.system].read(given)
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
    card = language_model_card(workdir, given, f"{which} checkpoint of step {step}")
    sizes, whole = config.model.lora.sizes, params
    if sizes is not None:
        whole = merge(Adapted(model.loaded.params, params), sizes.scale)
    with whole_folder(out) as building:
        save_language_model(model.loaded, whole, model.folder, building)
        if sizes is not None:
            table = table_of(model.loaded.model_config["model_type"])
            write_adapters(building / ADAPTER, table, sizes, params, task=CAUSAL_LM)
        write_whole(building / CARD, card)


# ---------------------------------------------------------------- model cards


def _rlvr_scores(summary: Fields, checkpoint: str) -> Scores:
    shown = ("em", "f1", "recall", "citation", "reward")
    return {
        retriever: {name: weights[checkpoint]["all"][name]["mean"] for name in shown}
        for retriever, weights in summary["scores"].items()
        if checkpoint in weights
    }


def _leret_scores(summary: Fields, checkpoint: str) -> Scores:
    """Of the pool after the last hop."""
    scores, last = summary["scores"], summary["config"]["writing"]["hops"]
    if checkpoint not in scores:
        return {}
    own = scores[checkpoint]
    row = f"after hop {last}, {own['questions']} questions"
    return {row: {name: own[f"hop{last}/{name}"]["mean"] for name in SHOWN}}


def _deepretrieval_scores(summary: Fields, checkpoint: str) -> Scores:
    found = dict(summary["collections"])
    if len(found) > 1:
        found["all collections"] = summary["pooled"]
    return {
        f"{name}, {own['scored']} queries": {
            measure: each["mean"] for measure, each in own["scores"][checkpoint].items()
        }
        for name, own in found.items()
        if own["scores"].get(checkpoint)
    }


class Exported(NamedTuple):
    """One system whose language models can be exported."""

    title: str  # its name for readers
    learned: str  # what its models learn, as in "A language model that learned to …"
    read: Callable[[ConfigDict], TokenConfig]
    scored: str  # what a row of scores is of
    # (content of `eval/summary.json`, name of a checkpoint) → its scores; {}: there are none
    scores: Callable[[Fields, str], Scores]


EXPORTED: Mapping[str, Exported] = {
    rlvr_config.NAME: Exported(
        "RLVR", "search with tools", rlvr_config.RlvrConfig.of, "retriever", _rlvr_scores
    ),
    leret_config.NAME: Exported(
        "LeReT",
        "write search queries, one at each hop",
        leret_config.LeretConfig.of,
        "passages found",
        _leret_scores,
    ),
    deepretrieval_config.NAME: Exported(
        "DeepRetrieval",
        "rewrite search queries",
        deepretrieval_config.RewriteConfig.of,
        "collection",
        _deepretrieval_scores,
    ),
}
_PRIVATE = ("engine.email", "engine.url", "llm.url")  # persons and addresses, not on a card


def language_model_card(workdir: Path, given: ConfigDict, checkpoint: str) -> str:
    """The card as Markdown; it names no folder of the training machine."""
    system, fields = EXPORTED[given.system], without_folders(given.to_dict())
    for name in _PRIVATE:
        section, _, field = name.partition(".")
        fields.get(section, {}).pop(field, None)
    base = fields["model"]["path"] or "a tiny decoder, made for the run"
    by_ppo = fields.get("algorithm") == deepretrieval_config.PPO and fields["ppo"]["critic"] != NONE
    critic = "PPO's critic, with its value head, is not part of this model. " if by_ppo else ""
    lines = [
        f"# {workdir.resolve().name}",
        "",
        f"A language model that learned to {system.learned}, by qrag_jax ({system.title}): "
        f"{checkpoint}. It started from {base}. It is an ordinary causal model of transformers, "
        f"and `{ADAPTER}`, if it is here, holds its adapters alone, in PEFT's format. {critic}The "
        "config has its prompt and its data.",
        "",
    ]
    path = workdir / "eval" / SUMMARY
    if path.exists():
        found = system.scores(json.loads(path.read_text(encoding="utf-8")), checkpoint)
        for number, (name, means) in enumerate(found.items()):
            if not number:
                lines += ["## Scores", "", f"| {' | '.join([system.scored, *means])} |"]
                lines.append("|---" * (len(means) + 1) + "|")
            lines.append(f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means.values())} |")
    lines += ["", "## Config", "", "```json", json.dumps(fields, indent=2), "```", ""]
    return "\n".join(lines)
