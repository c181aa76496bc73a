"""A trained run on disk, as the commands that score it open it: config, encoder, checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_collections
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from qrag_jax import experiment
from qrag_jax.algorithms import placement
from qrag_jax.encoders.lora import Adapted
from qrag_jax.encoders.pretrained import LoadedEncoder
from qrag_jax.encoders.text_encoder import Params
from qrag_jax.errors import InputError
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.compilation import enable_persistent_cache
from qrag_jax.runtime.mesh import make_mesh

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run to score.")
CHECKPOINT = flags.DEFINE_enum("checkpoint", "best", ["best", "last"], "Which checkpoint.")
flags.DEFINE_string("eval_config", None, "Config FILE whose fields replace the run's.")


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
        enable_persistent_cache(workdir / "compilation_cache")
        mesh = make_mesh(config.runtime.mesh)
        if not (workdir / "encoder").exists():
            raise InputError(
                f"{workdir} holds no encoder; --workdir must be a run that was trained."
            )
        loaded = experiment.prepare_encoder(config, workdir, [])
        rules = experiment.sharding_rules(config)
        shardings = placement.params_shardings(mesh, rules, loaded.trained)
        if loaded.adapters is not None:
            base = placement.base_shardings(mesh, rules, loaded.params)
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
        trained, step = Checkpoints(self.workdir).restore_params(which, template)
        return self._with_base(trained), step

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
        return jax.device_put(self.loaded.params, self.shardings.base)


def _argument(argv: Sequence[str], name: str) -> str | None:
    """The value of `--name=value` or `--name value`, read before absl knows the config."""
    for i, word in enumerate(argv):
        flag, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == name:
            return value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return None


def define_config(argv: Sequence[str]) -> None:
    """Makes the run's saved config, updated by `--eval_config`, the flag `--config`."""
    workdir = _argument(argv, "workdir")
    if {"--help", "-h", "--helpfull"} & set(argv):
        return
    if workdir is None:
        raise InputError("give the run to score, for example --workdir=runs/hotpotqa.")
    config = experiment.load_config(Path(workdir) / "config.json")
    if file := _argument(argv, "eval_config"):
        _replace_fields(config, file)
    config_flags.DEFINE_config_dict("config", config, lock_config=True)


def _replace_fields(config: ml_collections.ConfigDict, file: str) -> None:
    """Puts the fields of the config `file` into `config`; the sources as one whole."""
    parser = config_flags.config_flags.ConfigFileFlagParser(name="eval_config")
    try:
        fields = parser.parse(file)
        if "sources" in fields.get("data", {}):
            del config.data.sources
            config.data.sources = fields.data.sources
        config.lock().update(fields)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[-1].strip().removeprefix("ValueError: ")
        raise InputError(f"--eval_config={file}: {reason}") from None
