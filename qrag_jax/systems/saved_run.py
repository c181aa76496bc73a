"""Opens a trained run for the commands that score or export it: config, encoder, checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.episodes import Player
from qrag_jax.feedback.facts import fact_feedback
from qrag_jax.learners import placement
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.first_encoder import FOLDER, prepare_encoder
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.saved_config import flat
from qrag_jax.systems.q_rag_config import QRagConfig, settled


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A saved run on the mesh of this machine."""

    workdir: Path
    config: QRagConfig
    given: dict[str, Any]  # the config, as it was given
    fields: dict[str, Any]  # the same by names with dots, with all open fields settled
    mesh: Mesh
    loaded: LoadedEncoder
    # Where the parameters live: two towers stacked on axis 0, or (`Adapted`) their adapters
    # stacked, over one base
    shardings: Params | Adapted

    @classmethod
    def open(
        cls,
        workdir: Path,
        config: ConfigDict,
        mesh_of: Callable[[tuple[int, int, int]], Mesh] = make_mesh,
    ) -> SavedRun:
        """Reads the encoder of the run in `workdir`.

        Args:
            config: the run's config, possibly with other data or other settings of evaluation.
            mesh_of: makes the mesh of the config's sizes.
        """
        taken = QRagConfig.of(config, scoring=True)
        mesh = taken.mesh(mesh_of)
        taken.eval.check_devices(mesh.size)
        if not (workdir / FOLDER).exists():
            raise InputError(
                f"{workdir} holds no encoder; --workdir must be a run that was trained."
            )
        loaded = prepare_encoder(
            taken.encoder, workdir, [], taken.seed, is_kept=True, platform=Platform.of(mesh)
        )
        rules = taken.runtime.rules(loaded.partition_rules)
        trained = placement.params_shardings(mesh, rules, loaded.trained)
        shardings = merge(trained, placement.base_shardings(mesh, rules, loaded.base))
        fields = flat(settled(config, loaded.encoder).to_dict())
        return cls(
            workdir=workdir,
            config=taken,
            given=config.to_dict(),
            fields=fields,
            mesh=mesh,
            loaded=loaded,
            shardings=shardings,
        )

    @property
    def player(self) -> Player:
        """How the run's retriever plays."""
        config = self.config
        feedback = fact_feedback(config.reward, stop_action=config.env.stop_action)
        return Player(
            self.mesh,
            self.shardings,
            self.loaded.encoder,
            config.rollout,
            feedback,
            gamma=config.pqn.gamma,
        )

    def trained(self, which: str) -> tuple[Params | Adapted, int]:
        """The parameters of the "best" or the "last" checkpoint, and their optimizer step."""
        template = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                (2, *leaf.shape), leaf.dtype, sharding=sharding
            ),
            self.loaded.trained,
            self._trained_shardings,
        )
        trained, step = Checkpoints(self.workdir, read_only=True).restore_params(which, template)
        return self._with_base(trained), step

    def chosen(self, checkpoint: str = "") -> str:
        """The checkpoint that is used: the given one, else the best one if that is trained."""
        if not checkpoint and Checkpoints(self.workdir, read_only=True).best_step() == 0:
            raise InputError(
                f"the best checkpoint of {self.workdir} is that of step 0, the untrained weights; "
                "give --checkpoint=last for the trained ones, or --checkpoint=best for these."
            )
        return checkpoint or "best"

    def untrained(self) -> Params | Adapted:
        """The parameters the run started from."""
        loaded = self.loaded
        towers = placement.both_towers(self._trained_shardings, loaded.trained, loaded.second)
        return self._with_base(towers)

    @property
    def _trained_shardings(self) -> Params:
        adapted = isinstance(self.shardings, Adapted)
        return self.shardings.adapters if adapted else self.shardings

    def _with_base(self, towers: Params) -> Params | Adapted:
        return merge(towers, self._base)

    @functools.cached_property
    def _base(self) -> Params | None:
        """The frozen base on the mesh, placed once and shared by all adapters; None without one."""
        if not isinstance(self.shardings, Adapted):
            return None
        return placement.place(self.loaded.stored, self.shardings.base)
