"""Exports a run's towers as sentence-transformers models, with their adapters and a model card.

`state` embeds states (the question and the chunks taken so far), `chunk` embeds chunks. Both give
the same vectors as in training. For a run with LoRA, both have the adapters merged in;
`adapter-state` and `adapter-chunk` hold the adapters alone, in PEFT's format.

`retriever.json` holds all other settings that a search needs, so that the folder is a retriever.

The encoder's scale (0.1 for the mean of BERT's hidden states, as in Q-RAG) is multiplied into the
trunk's last norm: every pooling is linear, so vectors come out scaled, in any server of embeddings.
Normalised vectors lose a factor in the norm; theirs stays a module of its own.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

import qrag_jax
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import state_width
from qrag_jax.evaluators.log_record import Retriever
from qrag_jax.metrics.stopping import REPORT
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.compute.rope import THETA
from qrag_jax.models.files.sentence_transformers import (
    check_tokenizer,
    token_name,
    write_modules,
    write_tokenizer,
)
from qrag_jax.models.files.weight_names import LeafPath, save_folder
from qrag_jax.models.first_encoder import origin
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.pretrained import VECTOR_SCALE, LoadedEncoder, save_adapters
from qrag_jax.models.trunks.families import family_of
from qrag_jax.models.trunks.trunk import LAYERS
from qrag_jax.retrieval.exported import chunk_digest
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.runtime import retriever_config as retriever_file
from qrag_jax.runtime.digests import sha256
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields
from qrag_jax.runtime.whole_files import check_is_free, whole_folder, write_whole
from qrag_jax.systems import model_card
from qrag_jax.systems.model_card import without_folders
from qrag_jax.systems.q_rag_config import QRagConfig, load_config
from qrag_jax.systems.q_rag_scoring import SUMMARY, checkpoint_label
from qrag_jax.systems.saved_run import SavedRun

CARD = "README.md"
ADAPTER = "adapter"  # prefix of the names of the folders in PEFT's format


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


def parameters(loaded: LoadedEncoder, number: int, params: Params | Adapted) -> Params:
    """The parameters of one tower, with its adapters merged in, as float32 NumPy arrays."""
    if not isinstance(params, Adapted):
        return _on_host(params, number)
    merged = Adapted(loaded.params, _on_host(params.adapters, number))
    return merge(merged, loaded.encoder.lora_scale)


def _on_host(stacked: Params, number: int) -> Params:
    """One tower of both; of several hosts, all call this together."""

    def gathered(leaf: Any) -> np.ndarray:
        part = leaf[number]
        if isinstance(part, jax.Array) and not part.is_fully_addressable:
            part = multihost_utils.process_allgather(part, tiled=True)
        return np.asarray(part, np.float32)

    return jax.tree.map(gathered, stacked)


def scale_outside(encoder: TextEncoder) -> float:
    """The factor on the vectors that an exported tower's weights cannot hold; 1: there is none."""
    return encoder.scale if encoder.normalise else 1.0


def scaled_norm(params: Params, norm: LeafPath, factor: float) -> Params:
    """One tower's parameters with its last norm, and so all hidden states, times a factor.

    Args:
        params: as NumPy arrays; they stay as they are.
        norm: the place of the norm's weights (`Family.last_norm`). Of a norm in the layers, only
            the last layer's is multiplied.
        factor: multiplies the norm's weight and, if it has one, its bias.
    """
    *in_layers, name = norm
    tree = params[LAYERS] if in_layers else params
    scaled = jax.tree.map(np.array, tree[name])  # copies
    for leaf in scaled.values():
        (leaf[-1] if in_layers else leaf)[...] *= np.float32(factor)
    tree = tree | {name: scaled}
    return params | {LAYERS: tree} if in_layers else tree


def write_tower(loaded: LoadedEncoder, tower: Tower, params: Params | Adapted, out: Path) -> None:
    """Writes one tower as a folder that `SentenceTransformer(out)` reads.

    Args:
        params: parameters of both towers, stacked on axis 0; in an `Adapted`, only the adapters
            are stacked.
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
    one = parameters(loaded, tower.number, params)
    one = scaled_norm(one, family.last_norm, encoder.scale / outside)
    config = loaded.model_config | {VECTOR_SCALE: outside}
    save_folder(family.table, one, config, out, out)


def run_chunk_digest(run: SavedRun, params: Params | Adapted) -> str:
    """The digest of a run's tower of chunks, as it would be exported; writes it for a moment."""
    _, tower = towers(run.loaded, run.config)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / tower.name
        write_tower(run.loaded, tower, params, out)
        return chunk_digest(out)


def export(run: SavedRun, which: str, out: Path) -> None:
    """Writes both towers of a checkpoint, their adapters and the model card.

    Args:
        which: "best" or "last".
        out: a new or empty folder.
    """
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
                adapters = _on_host(params.adapters, tower.number)
                save_adapters(run.loaded, adapters, building / f"{ADAPTER}-{tower.name}")
        about = retriever_config(run, building, threshold)
        card = model_card.card(model_card.Facts(run, about, which, step, scored, scores))
        for folder in (building, *building.iterdir()):
            write_whole(folder / CARD, card)
        about.write(building)


def stop_threshold(run: SavedRun, label: str, params: Params | Adapted) -> float | None:
    """The threshold on Q at which the run's searches stop; None: there is none.

    It is the config's (`config.eval.stop_threshold`), else what `evaluate --log` found on the
    log of this checkpoint. A report for other weights is not used, which is said.

    Args:
        label: the checkpoint's label, such as "best-160".
        params: its parameters, as `SavedRun.trained` gives them.
    """
    given = run.config.eval.stop_threshold
    if given > -math.inf:
        return given
    path = run.workdir / "eval" / label / REPORT
    if not path.exists():
        return None
    report = read_fields(path)
    weights = report["provenance"].get("weights")
    if weights != Retriever.of(label, params).weights:
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
