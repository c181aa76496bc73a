"""A trained retriever's towers computed by JAX: those of a run's folder, or exported ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.learners import placement
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.precision import AUTO
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.retrieval.towers import (
    TOWER_END,
    RowForm,
    Towers,
    exported_digest,
    form_of,
    read_rows,
)
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.rollouts.text_table import MeshTower
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems import exports
from qrag_jax.systems.config import load_config
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.q_rag_scoring import checkpoint_label
from qrag_jax.systems.retriever import Backend
from qrag_jax.systems.saved_run import SavedRun


def of_run(workdir: Path, checkpoint: str = "", dtype: str = "") -> Backend:
    """The towers of a run's checkpoint; see `retriever.LoadSettings`."""
    given = load_config(workdir / CONFIG_NAME)
    if dtype:
        given.encoder.dtype = dtype
    run = SavedRun.open(workdir, given)
    which = run.chosen(checkpoint)
    params, step = run.trained(which)
    threshold = exports.stop_threshold(run, checkpoint_label(which, step), params)
    # There are no files yet: the weights are those of the checkpoint.
    config = exports.retriever_config(run, workdir / "not exported", threshold)
    state, chunk = exports.towers(run.loaded, run.config)
    form = form_of(config, state.opening, chunk.opening)
    both = _mesh_towers(run.mesh, run.shardings, [run.loaded.encoder] * 2, params, form)
    passages = PassageEncoder.of_run(run, params)
    return Backend(
        config,
        Towers(run.loaded.tokenizer, form, *both),
        functools.cache(lambda: passages.digest().partition(TOWER_END)[0]),
        lambda: passages,
    )


def of_export(folder: Path, dtype: str = "") -> Backend:
    """Exported towers on all devices of this process."""
    config, dtype, mesh = RetrieverConfig.read(folder), dtype or AUTO, make_mesh()
    config.check_weights(folder)
    state, chunk = (
        load_encoder(folder / tower.folder, dtype, platform=Platform.of(mesh))
        for tower in (config.state, config.chunk)
    )
    shardings = placement.params_shardings(mesh, state.partition_rules, state.stored)
    # Leaf by leaf, so that the host never holds more than one of both towers.
    assert (STATE, CHUNK) == (0, 1)
    params = jax.tree.map(
        lambda one, other, sharding: jax.device_put(
            np.stack([np.asarray(one), np.asarray(other)]), sharding
        ),
        state.stored,
        chunk.stored,
        shardings,
    )
    tokenizer, form = read_rows(folder, config)
    both = _mesh_towers(mesh, shardings, [state.encoder, chunk.encoder], params, form)
    return Backend(
        config,
        Towers(tokenizer, form, *both),
        functools.cache(lambda: exported_digest(folder, config, form)),
        lambda: PassageEncoder.of_folder(str(folder), EncoderConfig(dtype=dtype)),
    )


def _mesh_towers(
    mesh: Mesh,
    shardings: Any,
    encoders: Sequence[TextEncoder],
    params: Params | Adapted,
    form: RowForm,
) -> Iterator[MeshTower]:
    """The towers of states and of chunks, whose parameters are stacked."""
    lengths = {STATE: form.state_tokens, CHUNK: form.chunk_tokens}
    for (number, tokens), encoder in zip(lengths.items(), encoders, strict=True):
        yield MeshTower(mesh, shardings, encoder, params, number=number, row_tokens=tokens)
