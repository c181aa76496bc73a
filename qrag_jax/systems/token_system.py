"""Opens systems whose policy is a language model: data, mesh, and the server that samples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from qrag_jax.errors import InputError
from qrag_jax.feedback.service import leave_room
from qrag_jax.llm.llm_config import LlmConfig
from qrag_jax.llm.served_config import ServedConfig
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.first_language_model import FirstLanguageModel, LanguageModelConfig
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.rollouts.token_sampler import SamplingConfig
from qrag_jax.runtime import determinism
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.runtime_config import RuntimeConfig
from qrag_jax.systems.served_policy import ServedPolicy, ServedSettings, open_served


class TokenConfig(Protocol):
    """What is read here of a config.

    Attributes:
        llm: of the server that samples; None: the device does.
    """

    @property
    def llm(self) -> ServedConfig | None: ...
    @property
    def runtime(self) -> RuntimeConfig: ...
    @property
    def model(self) -> LanguageModelConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...


class TokenInputs(Protocol):
    """What is read here of a system's inputs."""

    @property
    def model(self) -> FirstLanguageModel: ...
    @property
    def speech(self) -> Any: ...


Inputs = TypeVar("Inputs", bound=TokenInputs)


@dataclasses.dataclass(frozen=True)
class Opened(Generic[Inputs]):
    """What a system plays and learns with.

    Attributes:
        workdir: the run's folder.
        placed: else the mesh's devices are described, and only shapes are made.
        keep: saves the parameters at the end of a stage, with the steps done until then.
        kept: what `keep` saved of a step, given a tree of shapes; None: it is not there.
        last: the state of the newest checkpoint and its step, given a tree of shapes.
        served: what samples the episodes that are learned from; None: the device.
    """

    mesh: Mesh
    inputs: Inputs
    workdir: Path
    placed: bool = True
    keep: Callable[[int, Any], None] = lambda step, params: None
    kept: Callable[[int, Any], Any | None] = lambda step, template: None
    last: Callable[[Any], tuple[Any, int] | None] = lambda template: None
    served: ServedPolicy | None = None


@dataclasses.dataclass(frozen=True)
class Opening(Generic[Inputs]):
    """How a system is opened.

    Attributes:
        load: of the mesh: reads data and model, and refuses those that cannot be used.
        save: saves the config of a run that begins.
        alone: what one host does, such as "episodes with tools are played".
        staleness: updates between playing a batch and learning from it.
    """

    load: Callable[[Mesh], Inputs]
    save: Callable[[], None]
    alone: str
    staleness: int = 0


def speech_of(config: TokenConfig, model: FirstLanguageModel, turn: int) -> Speech:
    """Between the text and the ids of a model.

    Args:
        turn: most tokens that a turn may sample.

    Raises:
        InputError: the model has fewer positions than an episode may have tokens.
    """
    thinking = {"": None, "on": True, "off": False}[config.model.thinking]
    loaded, room = model.loaded, config.sampling.room
    if room > loaded.model.max_positions:
        raise InputError(
            f"config.sampling.room is {room}, but {model.folder} has "
            f"{loaded.model.max_positions} positions; lower it."
        )
    return Speech(loaded.tokenizer, scaffold_of(loaded.tokenizer, thinking=thinking), turn, room)


def before_devices(config: TokenConfig, *, dry: bool = False, described: bool = False) -> str:
    """Sets how much of a GPU's memory JAX takes, and that its programs are deterministic."""
    if config.llm is not None and not dry:
        leave_room(LlmConfig(url=config.llm.url, server=config.llm.server))
    return determinism.ask(config.runtime.deterministic, described=described)


@contextlib.contextmanager
def opened(
    config: TokenConfig,
    run: Run,
    opening: Opening[Inputs],
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Opened[Inputs]]:
    """Opens what a system needs, and the server that samples if the config has one.

    Args:
        dry: nothing is sampled, so no server is started.
        devices: of the mesh; None: all there are.

    Raises:
        InputError: there are several hosts, or the data or the model cannot be used.
    """
    if jax.process_count() > 1:
        raise InputError(
            f"there are {jax.process_count()} hosts, and {opening.alone} by one; start one process."
        )
    mesh = make_mesh(config.runtime.mesh, devices)
    inputs = opening.load(mesh)
    if not run.has_begun:
        opening.save()

    def keep(step: int, params: Any) -> None:
        run.checkpoints.save_stage(step, params)

    def kept(step: int, template: Any) -> Any | None:
        run.checkpoints.wait()
        return run.checkpoints.restore_params_of(step, template)

    def last(template: Any) -> tuple[Any, int] | None:
        run.checkpoints.wait()
        if run.checkpoints.last_step() is None:
            return None
        found = run.checkpoints.restore_last(template)
        return found.state, found.step

    with contextlib.ExitStack() as stack:
        served = None
        if config.llm is not None and not dry:
            sizes = config.model.lora.sizes
            settings = ServedSettings(config.llm, config.sampling, sizes, opening.staleness)
            served = stack.enter_context(
                open_served(settings, inputs.model, inputs.speech, run.workdir)
            )
        placed = devices is None
        yield Opened(
            mesh,
            inputs,
            run.workdir,
            placed=placed,
            keep=keep,
            kept=kept,
            last=last,
            served=served,
        )
