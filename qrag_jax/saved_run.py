"""A trained run on disk, as the commands that score it open it: config, encoder, checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import jax
import ml_collections
from jax.sharding import Mesh

from qrag_jax import experiment
from qrag_jax.errors import InputError
from qrag_jax.learners import placement
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.compilation import enable_persistent_cache
from qrag_jax.runtime.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What was saved, on the mesh of this machine.

    Attributes:
        shardings: where parameters live: two towers stacked on axis 0, or (`Adapted`) their
            adapters stacked over the one base.
    """

    workdir: Path
    config: ml_collections.ConfigDict
    mesh: Mesh
    loaded: LoadedEncoder
    shardings: Params | Adapted

    @classmethod
    def open(cls, workdir: Path, config: ml_collections.ConfigDict) -> SavedRun:
        """Reads the encoder of the run in `workdir`.

        Raises:
            InputError: it is not a run that was trained, or its encoder cannot be used.
        """
        if os.access(workdir, os.W_OK):  # a run that may only be read is scored without
            enable_persistent_cache(workdir / "compilation_cache")
        mesh = make_mesh(config.runtime.mesh)
        if not (workdir / "encoder").exists():
            raise InputError(
                f"{workdir} holds no encoder; --workdir must be a run that was trained."
            )
        loaded = experiment.prepare_encoder(config, workdir, [])
        rules = experiment.sharding_rules(config, loaded.partition_rules)
        shardings = placement.params_shardings(mesh, rules, loaded.trained)
        if loaded.adapters is not None:
            base = placement.base_shardings(mesh, rules, loaded.stored)
            shardings = Adapted(base, shardings)
        return cls(workdir, config, mesh, loaded, shardings)

    def trained(self, which: str) -> tuple[Params | Adapted, int]:
        """The parameters of the "best" or the "last" checkpoint, and their optimizer step.

        Raises:
            InputError: there is no such checkpoint.
        """
        template = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                (2, *leaf.shape), leaf.dtype, sharding=sharding
            ),
            self.loaded.trained,
            self._trained_shardings,
        )
        trained, step = Checkpoints(self.workdir, read_only=True).restore_params(which, template)
        return self._with_base(trained), step

    def best_is_untrained(self) -> bool:
        """Whether no evaluation scored above the parameters the run started from."""
        return Checkpoints(self.workdir).best_step() == 0

    def untrained(self) -> Params | Adapted:
        """The parameters the run started from."""
        towers = placement.both_towers(self._trained_shardings, self.loaded.trained)
        return self._with_base(towers)

    @property
    def _trained_shardings(self) -> Params:
        adapted = isinstance(self.shardings, Adapted)
        return self.shardings.adapters if adapted else self.shardings

    def _with_base(self, towers: Params) -> Params | Adapted:
        return towers if self._base is None else Adapted(self._base, towers)

    @functools.cached_property
    def _base(self) -> Params | None:
        """The frozen base on the mesh, once for all that stands on it."""
        if not isinstance(self.shardings, Adapted):
            return None
        return placement.place(self.loaded.stored, self.shardings.base)
