"""A trained retriever's towers computed by JAX: those of a run's folder, or exported ones."""

from __future__ import annotations

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
from qrag_jax.retrieval.exported import chunk_digest, form_of, read_rows
from qrag_jax.retrieval.tower_rows import RowForm, Towers
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.rollouts.text_table import MeshTower
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems import towers_export
from qrag_jax.systems.config import load_config
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.q_rag_scoring import checkpoint_label
from qrag_jax.systems.saved_run import SavedRun


class RunTowers:
    """The towers of a run's checkpoint; see `retriever.Backend` and `LoadSettings`."""

    def __init__(self, workdir: Path, checkpoint: str = "", dtype: str = "") -> None:
        given = load_config(workdir / CONFIG_NAME)
        if dtype:
            given.encoder.dtype = dtype
        run = SavedRun.open(workdir, given)
        self._run, self._checkpoint = run, run.chosen(checkpoint)
        params, step = run.trained(self._checkpoint)
        self._params = params
        label = checkpoint_label(self._checkpoint, step)
        threshold = towers_export.stop_threshold(run, label, params)
        # There are no files yet: the weights are those of the checkpoint.
        self.config = towers_export.retriever_config(run, workdir / "not exported", threshold)
        state, chunk = towers_export.towers(run.loaded, run.config)
        form = form_of(self.config, state.opening, chunk.opening)
        both = _mesh_towers(run.mesh, run.shardings, [run.loaded.encoder] * 2, params, form)
        self.towers = Towers(run.loaded.tokenizer, form, *both)

    def chunk_digest(self) -> str:
        """The digest of the tower of chunks, as it would be exported."""
        return towers_export.run_chunk_digest(self._run, self._params)

    def passage_encoder(self) -> PassageEncoder:
        """Embeds the passages of an index."""
        return PassageEncoder.of_run(self._run, self._checkpoint)


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


class ExportedTowers:
    """Exported towers on all devices of this process; see `retriever.Backend`."""

    def __init__(self, folder: Path, dtype: str = "") -> None:
        self._folder, self._dtype = folder, dtype or AUTO
        self.config = RetrieverConfig.read(folder)
        self.config.check_weights(folder)
        mesh = make_mesh()
        state, chunk = (
            load_encoder(folder / tower.folder, self._dtype, platform=Platform.of(mesh))
            for tower in (self.config.state, self.config.chunk)
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
        tokenizer, form = read_rows(folder, self.config)
        encoders = [state.encoder, chunk.encoder]
        self.towers = Towers(
            tokenizer, form, *_mesh_towers(mesh, shardings, encoders, params, form)
        )

    def chunk_digest(self) -> str:
        """The digest of the tower of chunks."""
        return chunk_digest(self._folder / self.config.chunk.folder)

    def passage_encoder(self) -> PassageEncoder:
        """Embeds the passages of an index."""
        return PassageEncoder.of_folder(str(self._folder), EncoderConfig(dtype=self._dtype))
