"""Opens an environment of `verifiers` and the model that is trained on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from qrag_jax.environments.tools.episode import Agent
from qrag_jax.environments.verifiers_process import (
    About,
    EnvironmentProcess,
    ProcessLost,
    ProcessSpec,
)
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import Drawn, drawn
from qrag_jax.llm.server.model_digest import model_digest
from qrag_jax.llm.text.chat_rendering import ChatRenderer, TextLost, content_text
from qrag_jax.llm.text.json_objects import well_formed
from qrag_jax.models.first_language_model import FirstLanguageModel, prepare_language_model
from qrag_jax.rollouts.token_episodes import Library, Speech
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import default_cache
from qrag_jax.systems.environment_config import EnvironmentConfig
from qrag_jax.systems.rlvr_config import RlvrConfig
from qrag_jax.systems.token_system import speech_of

MODEL = "policy"  # its name for environments
LOG = "verifiers.log"
ENDLESS = 1000  # tasks that are taken of a taskset that has no end
_HELD_OUT = 10  # one task of so many is scored, where an environment says nothing of it


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks of an environment: those with numbers `first` to `first + count - 1` of a split."""

    split: str
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def number(self, place: int) -> int:
        """The number of a task in its split."""
        return self.first + place

    def name(self, place: int) -> str:
        """What people know a task by."""
        return f"{self.split}-{self.number(place)}"


@dataclasses.dataclass(frozen=True)
class EnvironmentInputs:
    """What a run reads.

    Attributes:
        model: what is trained.
        process: has the environment.
        about: what it says of itself.
        renderer: between messages and ids.
        speech: of turns, without tools.
        train, dev: tasks.
        drawn: those of `dev` that are scored.
        data: content keys.
    """

    model: FirstLanguageModel
    process: EnvironmentProcess
    about: About
    renderer: ChatRenderer
    speech: Speech
    train: Tasks
    dev: Tasks
    drawn: Drawn
    data: dict[str, str]

    @property
    def shown(self) -> Sequence[int]:
        """The places in `dev` that are scored."""
        return self.drawn.places

    @property
    def agent(self) -> Agent | None:
        """The environment is played elsewhere."""
        return None

    @property
    def library(self) -> Library | None:
        """See `agent`."""
        return None

    def question(self, tasks: Tasks, place: int) -> str:
        """The last text of a task's first messages, or its name if they are not known here."""
        before = self.about.sizes["train"] if tasks.split == "eval" else 0
        number = before + tasks.number(place)
        if number < len(self.about.prompts) and self.about.prompts[number]:
            return content_text(self.about.prompts[number][-1].get("content"))
        return tasks.name(place)


def load_environment(config: RlvrConfig, workdir: Path, mesh: Mesh) -> EnvironmentInputs:
    """Starts the process, prepares the model, and looks at the first prompts."""
    if jax.process_count() > 1:
        raise InputError(
            f"config.env.verifiers is {config.env.verifiers!r}, which is played by one host, and "
            f"there are {jax.process_count()}; give one."
        )
    process = EnvironmentProcess(spec_of(config, workdir))
    try:
        return _loaded(config, workdir, mesh, process)
    except BaseException:
        process.end()
        raise


def spec_of(config: RlvrConfig, workdir: Path) -> ProcessSpec:
    """How the process of a config is started."""
    env = config.env
    fields = {
        "id": env.verifiers,
        "arguments": env.given(),
        "model": MODEL,
        "limits": {
            "seconds": env.seconds,
            "turns": env.max_turns,
            "tokens": env.max_tokens,
            "turn_tokens": config.tools.turn_tokens,
            "temperature": config.sampling.temperature,
        },
        "tasks": env.tasks,
        "endless": ENDLESS,
        "harness": env.harness,
        "renderer": env.renders(),
    }
    return ProcessSpec(env.interpreter(), workdir / LOG, fields)


def _loaded(
    config: RlvrConfig, workdir: Path, mesh: Mesh, process: EnvironmentProcess
) -> EnvironmentInputs:
    env = config.env
    try:
        about = process.start(lambda: None)
    except ProcessLost as lost:
        raise InputError(
            f"the environment {env.verifiers!r} cannot be opened: {lost}; mend it."
        ) from None
    train, dev = _split(env, about)
    log(
        f"environment {env.verifiers} by verifiers {about.version}, in a process of "
        f"its own, without a sandbox: {len(train)} tasks to train, {len(dev)} to score"
    )

    def texts() -> Iterator[str]:
        for messages in about.prompts:
            yield from (well_formed(content_text(each.get("content"))) for each in messages)

    model = prepare_language_model(
        config.model, workdir, texts, config.seed, platform=Platform.of(mesh)
    )
    thinking = {"": None, "on": True, "off": False}[config.model.thinking]
    renderer = ChatRenderer(model.loaded.tokenizer, config.tools.form, thinking)
    _check_prompts(config, about, renderer)
    return EnvironmentInputs(
        model=model,
        process=process,
        about=about,
        renderer=renderer,
        speech=speech_of(config, model, config.tools.turn_tokens),
        train=train,
        dev=dev,
        drawn=drawn([dev.name(place) for place in range(len(dev))], config.eval),
        data={
            "questions": about.digest,
            "model": model_digest(model.folder, default_cache(), log),
            "verifiers": about.version,
        },
    )


def _split(env: EnvironmentConfig, about: About) -> tuple[Tasks, Tasks]:
    """Tasks to train and to score; without any to score, some of the others are held out."""
    trains, scored = about.sizes["train"], about.sizes["eval"]
    if env.tasks:
        trains = min(trains, env.tasks)
    if not trains:
        raise InputError(
            f"the environment {env.verifiers!r} has no tasks to train on; name another, or give "
            "config.env.arguments by which it has."
        )
    if scored:
        return Tasks("train", 0, trains), Tasks("eval", 0, scored)
    if trains == 1:
        log("the environment has one task; it is trained on and scored")
        return Tasks("train", 0, 1), Tasks("train", 0, 1)
    held = max(trains // _HELD_OUT, 1)
    return Tasks("train", 0, trains - held), Tasks("train", trains - held, held)


def _check_prompts(config: RlvrConfig, about: About, renderer: ChatRenderer) -> None:
    longest: tuple[int, Any] = 0, 0
    for number, messages in enumerate(about.prompts):
        if not messages:
            continue
        try:
            ids = renderer.opening(messages, about.tools)
        except TextLost as lost:
            raise InputError(
                f"task {number} of the environment {config.env.verifiers!r} cannot be shown to the "
                f"model: {lost}."
            ) from None
        longest = max(longest, (len(ids), number))
    tokens, number = longest
    if tokens >= config.sampling.room:
        raise InputError(
            f"the first prompt of task {number} of {config.env.verifiers!r} has {tokens} tokens, "
            f"and config.sampling.room is {config.sampling.room}; raise it, up to the model's "
            "positions."
        )
