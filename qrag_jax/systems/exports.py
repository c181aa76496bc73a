"""Exports the models of a run, with their adapters and a model card.

Of Q-RAG these are two models of sentence-transformers. `state` embeds states (the question and the
chunks taken so far), `chunk` embeds chunks. Both give the same vectors as in training.
`retriever.json` holds all other settings that a search needs, so that the folder is a retriever.
The encoder's scale (0.1 for the mean of BERT's hidden states, as in Q-RAG) is multiplied into the
trunk's last norm: every pooling is linear, so vectors come out scaled, in any server of embeddings.
Normalised vectors lose a factor in the norm; theirs stays a module of its own.

Of the other systems it is a language model of transformers. Adapters are merged in, and are beside
it alone, in PEFT's format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from ml_collections import ConfigDict

import qrag_jax
from qrag_jax.data.config import DataConfig
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import state_width
from qrag_jax.learners import placement
from qrag_jax.learners.config import NONE
from qrag_jax.metrics.facts import FULL_BUDGET, table
from qrag_jax.metrics.stopping import REPORT
from qrag_jax.metrics.summaries import SHOWN
from qrag_jax.models.adapters import CAUSAL_LM, write_adapters
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.models.compute.rope import THETA
from qrag_jax.models.files.sentence_transformers import (
    check_tokenizer,
    token_name,
    write_modules,
    write_tokenizer,
)
from qrag_jax.models.files.weight_names import save_folder
from qrag_jax.models.first_encoder import origin
from qrag_jax.models.first_language_model import prepare_language_model
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import VECTOR_SCALE, LoadedEncoder, save_adapters
from qrag_jax.models.pretrained_lm import save_language_model, table_of
from qrag_jax.models.trunks.families import family_of
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.runtime import retriever_config as retriever_file
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.mesh import shardings_of
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.run import log
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields
from qrag_jax.runtime.whole_files import check_is_free, sha256, whole_folder
from qrag_jax.systems import deepretrieval_config, leret_config, rlvr_config, scoring
from qrag_jax.systems.config import load_config
from qrag_jax.systems.passage_encoder import on_host, one_tower, scale_outside
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.q_rag_scoring import (
    SUMMARY,
    checkpoint_label,
    training_seconds,
    weights_digest,
)
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.saved_token_run import mesh_of_run
from qrag_jax.systems.token_config import TokenConfig

CARD, ADAPTER = "README.md", "adapter"
_TEMPLATES = Path(__file__).parent / "cards"


class Tower(NamedTuple):
    """One of the two encoders of a run, as it is written."""

    name: str  # of its folder
    number: int  # its index on axis 0 of the parameters
    opening: tuple[int, ...]  # token ids that every row begins with
    max_tokens: int  # length of the longest row
    plain: bool  # whether a text is one part, not parts joined by the separator


def towers(loaded: LoadedEncoder, config: QRagConfig) -> tuple[Tower, Tower]:
    """The two towers of a run with this config."""
    encoder, data = loaded.encoder, config.data
    longest = state_width(
        len(encoder.state_opening),
        data.max_question_tokens,
        data.max_chunk_tokens_in_state,
        config.env.max_steps - 1,
    )
    of_state, of_chunk = (
        min(tokens, encoder.max_positions) for tokens in (longest, data.max_chunk_tokens)
    )
    return (
        Tower("state", STATE, encoder.state_opening, of_state, plain=False),
        Tower("chunk", CHUNK, encoder.chunk_opening, of_chunk, plain=True),
    )


def write_tower(loaded: LoadedEncoder, tower: Tower, params: Params | Adapted, out: Path) -> None:
    """Writes one tower as a folder that `SentenceTransformer(out)` reads.

    Args:
        params: see `passage_encoder.one_tower`.
        out: the folder, which this function creates.
    """
    encoder, tokenizer = loaded.encoder, loaded.tokenizer
    out.mkdir()
    for make in (write_tokenizer, check_tokenizer):
        make(out, tokenizer, tower.opening, max_tokens=tower.max_tokens, plain=tower.plain)
    family, outside = family_of(loaded.model_config, str(out)), scale_outside(encoder)
    write_modules(
        out,
        pooling=encoder.pooling,
        normalise=encoder.normalise,
        scale=outside,
        width=encoder.width,
        max_tokens=tower.max_tokens,
        pooler=family.pooler,
    )
    config = loaded.model_config | {VECTOR_SCALE: outside}
    save_folder(family.table, one_tower(loaded, tower.number, params), config, out, out)


def export(run: SavedRun, which: str, out: Path) -> None:
    """Writes both towers of a checkpoint, their adapters and the model card."""
    check_is_free(out)
    params, step = run.trained(which)
    threshold = stop_threshold(run, checkpoint_label(which, step), params)
    summary = run.workdir / SUMMARY
    scores = read_fields(summary) if summary.exists() else {}
    saved = load_config(run.workdir / CONFIG_NAME)  # `run.config` may have other data
    scored = QRagConfig.of(saved, scoring=True).dev_data
    with whole_folder(out) as building:
        for tower in towers(run.loaded, run.config):
            write_tower(run.loaded, tower, params, building / tower.name)
            if isinstance(params, Adapted):
                adapters = on_host(params.adapters, tower.number)
                save_adapters(run.loaded, adapters, building / f"{ADAPTER}-{tower.name}")
        about = retriever_config(run, building, threshold)
        written = card(run, about, which, step, scored=scored, summary=scores)
        for folder in (building, *building.iterdir()):
            written.save(folder / CARD)
        about.write(building)


def stop_threshold(run: SavedRun, label: str, params: Params | Adapted) -> float | None:
    """The threshold on Q at which the run's searches stop; None: there is none.

    It is the config's (`config.eval.stop_threshold`), else what `evaluate --log` found on the
    log of this checkpoint. A report for other weights is not used, which is said.
    """
    given = run.config.eval.stop_threshold
    if given > -math.inf:
        return given
    path = run.workdir / "eval" / label / REPORT
    if not path.exists():
        return None
    report = read_fields(path)
    weights = report["provenance"].get("weights")
    if weights != weights_digest(params):
        print(f"{path} was tuned for other weights, so its threshold is left out")
        return None
    return report["threshold"]


def retriever_config(run: SavedRun, folder: Path, threshold: float | None) -> RetrieverConfig:
    """What `retriever.json` says about towers exported to `folder`; see `stop_threshold`."""
    config, encoder, tokenizer = run.config, run.loaded.encoder, run.loaded.tokenizer
    state, chunk = (
        retriever_file.Tower(
            folder=tower.name,
            prefix=getattr(config.encoder, f"{tower.name}_prefix"),
            max_tokens=tower.max_tokens,
            width=encoder.width,
            scale=scale_outside(encoder),
            weights={
                path.name: sha256(path)
                for path in sorted((folder / tower.name).glob("*.safetensors"))
            },
        )
        for tower in towers(run.loaded, config)
    )
    return RetrieverConfig(
        format=retriever_file.FORMAT,
        library_version=qrag_jax.__version__,
        # A hub name, or the last part of a path; "": random weights.
        base_model=without_folders(origin(config.encoder.path, run.workdir)),
        state=state,
        chunk=chunk,
        title_separator=config.data.passage_separator,
        separator=token_name(tokenizer, tokenizer.sep_id),
        separator_id=tokenizer.sep_id,
        max_question_tokens=config.data.max_question_tokens,
        max_chunk_tokens_in_state=config.data.max_chunk_tokens_in_state,
        sort_by_index=config.env.sort_by_index,
        positions=retriever_file.Positions(
            kind=config.env.positions,
            theta=THETA,
            step=positions.STEP,
            span=positions.SPAN,
            parts=positions.PARTS,
            most_chunks=positions.MOST_CHUNKS,
        ),
        search=retriever_file.Search(
            max_steps=config.env.max_steps,
            beam=config.beam.beam,
            beam_score=config.beam.score,
            gamma=config.beam.gamma,
            alpha=config.beam.alpha,
            top_k_actions=config.beam.top_k_actions,
            stop_action=config.env.stop_action,
            stop_threshold=threshold,
        ),
    )


# ---------------------------------------------------------------- the card of towers

# How the card explains the positions of chunks, by the value of config.env.positions.
NUMBERING = {
    "absolute": "p = 0, 1, 2, … in document order",
    "random": "p = 0, 1, 2, … in document order (in training with random gaps)",
    positions.RANDOM_PUBLISHED: (
        f"p = i + d for chunk i, d the indent of its part of the document, of {positions.PARTS} "
        "parts, drawn from the question and the number of chunks"
    ),
    "relative": (
        f"with the taken chunks' indices sorted, i_1 < … < i_k, the m chunks from i_j up to "
        f"i_(j+1) stand at {positions.STEP}·j + ⌊linspace(0, {positions.SPAN}, m)⌋, "
        "those before i_1 at j = 0; it changes with every chunk taken"
    ),
}


def card(
    run: SavedRun,
    about: RetrieverConfig,
    which: str,
    step: int,
    *,
    scored: DataConfig,
    summary: Mapping[str, Any],
) -> ModelCard:
    """The card of towers, with the metadata that model hubs read.

    Args:
        about: what `retriever.json` says.
        which, step: the checkpoint, "best" or "last".
        scored: the data of the run's own evaluation.
        summary: content of `summary.json`; {} if the run was not scored.
    """
    name, config = run.workdir.resolve().name, run.config
    of_this = bool(summary) and (summary["checkpoint"], summary["step"]) == (which, step)
    data = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "multi-step-retrieval", "qrag_jax"],
        model_name=name if of_this else None,
        eval_results=_results(scored, summary) if of_this else None,
    )
    sources = ", ".join(source for source, weight in config.data.sources.items() if weight)
    path = without_folders(config.data.path)
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATES / "towers.md"),
        name=name,
        about=about,
        encoder=run.loaded.encoder,
        lora=run.loaded.lora,
        separator=json.dumps(about.separator),
        titled=json.dumps(about.title_separator),
        numbering=NUMBERING.get(about.positions.kind, ""),
        data=f"{sources} from `{path}`" if path else sources,
        which=which,
        step=step,
        steps=config.train.steps,
        seconds=training_seconds(run.workdir),
        scores=table(dict(summary)) if summary else "",
        of_this=of_this,
        fields=json.dumps(without_folders(run.given), indent=1, default=str),
    )


COLUMNS = ("fact_em", "fact_f1", "fact_precision", "fact_recall", "answer_found")
RECALL_AT = "recall@"  # begins the names of recall after k steps


def _results(data: DataConfig, summary: Mapping[str, Any]) -> list[EvalResult]:
    scores, questions = summary["trained"]["intervals"], summary["samples"]
    asked = f"{summary.get('mode', FULL_BUDGET)}, {questions:d} questions"
    sources = [source for source, weight in data.sources.items() if weight]
    shown = [*COLUMNS, *(column for column in scores if column.startswith(RECALL_AT))]
    return [
        EvalResult(
            task_type="information-retrieval",
            task_name="Retrieval in several steps",
            dataset_type="+".join(sources),
            dataset_name=" + ".join(sources)
            + (f" ({without_folders(data.path)})" if data.path else ""),
            dataset_split="dev",
            dataset_args={"questions": questions},
            metric_type=column,
            metric_name=f"{column}, {asked}",
            metric_value=round(scores[column]["mean"], 4),
            metric_args={
                "low": round(scores[column]["low"], 4),
                "high": round(scores[column]["high"], 4),
                "interval": "bootstrap, 95 %",
            },
        )
        for column in shown
        if column in scores  # of those at k
    ]


# An absolute path, up to the last slash before its last part. Parts of data are written as
# path,split;path,split and settings as name=path.
_FOLDERS = re.compile(r"(?<![^=,;])[~/][^=,;]*/(?=[^=,;/])")


def without_folders(value: Any) -> Any:
    """The value with all absolute paths in it, at any depth, cut to their last part."""
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_folders(item) for item in value)
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


# ---------------------------------------------------------------- language models

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
    written = language_model_card(workdir, given, f"{which} checkpoint of step {step}")
    sizes, whole = config.model.lora.sizes, params
    if sizes is not None:
        whole = folded(Adapted(model.params, params), sizes.scale)
    with whole_folder(out) as building:
        save_language_model(model, whole, model.folder, building)
        if sizes is not None:
            table = table_of(model.model_config["model_type"])
            write_adapters(building / ADAPTER, table, sizes, params, task=CAUSAL_LM)
        written.save(building / CARD)


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


def language_model_card(workdir: Path, given: ConfigDict, checkpoint: str) -> ModelCard:
    """The card of a language model; it names no folder of the training machine."""
    system, fields = EXPORTED[given.system], without_folders(given.to_dict())
    for name in _PRIVATE:
        section, _, field = name.partition(".")
        fields.get(section, {}).pop(field, None)
    path = workdir / "eval" / scoring.SUMMARY
    scores = system.scores(read_fields(path), checkpoint) if path.exists() else {}
    by_ppo = fields.get("algorithm") == deepretrieval_config.PPO
    return ModelCard.from_template(
        ModelCardData(
            library_name="transformers", pipeline_tag="text-generation", tags=["qrag_jax"]
        ),
        template_path=str(_TEMPLATES / "language_model.md"),
        name=workdir.resolve().name,
        learned=system.learned,
        title=system.title,
        checkpoint=checkpoint,
        base=fields["model"]["path"] or "a tiny decoder, made for the run",
        critic=by_ppo and fields["ppo"]["critic"] != NONE,
        scored=system.scored,
        scores=scores,
        fields=json.dumps(fields, indent=2),
    )
