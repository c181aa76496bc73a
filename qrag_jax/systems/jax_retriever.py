"""A trained retriever's towers computed by JAX: those of a run's folder, or exported ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import numpy as np

from qrag_jax.learners import placement
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.precision import AUTO, NAMES
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.retrieval.exported import chunk_digest, form_of, read_rows
from qrag_jax.retrieval.tower_rows import Towers
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.rollouts.text_table import MeshTower
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems import towers_export
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.q_rag_config import load_config
from qrag_jax.systems.q_rag_scoring import checkpoint_label
from qrag_jax.systems.saved_run import SavedRun


class RunTowers:
    """The towers of a run's checkpoint.

    Attributes:
        config: how the retriever searches; it names no files of weights.
        towers: the encoders.

    Args:
        workdir: the run's folder.
        checkpoint: "best" or "last"; "": "best", if that is a trained one.
        dtype: of the computation (`config.encoder.dtype`); "": that of the run.
    """

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
        both = towers_export.towers(run.loaded, run.config)
        # There are no files yet: the weights are those of the checkpoint.
        self.config = towers_export.retriever_config(run, both, workdir / "not exported", threshold)
        self.towers = run_towers(run, params, self.config)

    def chunk_digest(self) -> str:
        """The digest of the tower of chunks, as it would be exported."""
        return run_chunk_digest(self._run, self._params)

    def passage_encoder(self) -> PassageEncoder:
        """Embeds the passages of an index."""
        return PassageEncoder.of_run(self._run, self._checkpoint)

    def embedded(self, encoder: str) -> bool:
        """Whether an index with this digest of its encoder has the vectors of this tower."""
        return encoder == self.passage_encoder().digest()


def run_chunk_digest(run: SavedRun, params: Params | Adapted) -> str:
    """The digest of a run's tower of chunks, as it would be exported; writes it for a moment."""
    _, tower = towers_export.towers(run.loaded, run.config)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / tower.name
        towers_export.write_tower(run.loaded, tower, params, out)
        return chunk_digest(out)


def run_towers(run: SavedRun, params: Params | Adapted, config: RetrieverConfig) -> Towers:
    """A run's towers with these parameters, such as `run.untrained()`.

    Args:
        config: how the retriever searches.
    """
    both = towers_export.towers(run.loaded, run.config)
    state, chunk = (
        MeshTower(
            run.mesh,
            run.shardings,
            run.loaded.encoder,
            params,
            number=tower.number,
            row_tokens=tower.max_tokens,
        )
        for tower in both
    )
    form = form_of(config, both[0].opening, both[1].opening)
    return Towers(run.loaded.tokenizer, form, state, chunk)


class ExportedTowers:
    """Exported towers on all devices of this process.

    Attributes:
        config: `retriever.json`.
        towers: the encoders.

    Args:
        folder: of the export.
        dtype: of the computation (`config.encoder.dtype`); "": the faster one here.
    """

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
        of_state, of_chunk = (
            MeshTower(mesh, shardings, loaded.encoder, params, number=number, row_tokens=row_tokens)
            for loaded, number, row_tokens in (
                (state, STATE, form.state_tokens),
                (chunk, CHUNK, form.chunk_tokens),
            )
        )
        self.towers = Towers(tokenizer, form, of_state, of_chunk)

    def chunk_digest(self) -> str:
        """The digest of the tower of chunks."""
        return chunk_digest(self._folder / self.config.chunk.folder)

    def passage_encoder(self) -> PassageEncoder:
        """Embeds the passages of an index."""
        return self._passages(self._dtype)

    def embedded(self, encoder: str) -> bool:
        """Whether an index with this digest of its encoder has the vectors of this tower.

        They may have been computed in any dtype.
        """
        return any(encoder == self._passages(name).digest() for name in (self._dtype, *NAMES))

    def _passages(self, dtype: str) -> PassageEncoder:
        return PassageEncoder.of_folder(str(self._folder), EncoderConfig(dtype=dtype))
