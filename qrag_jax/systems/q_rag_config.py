"""Q-RAG's config: its sections, and the dataclass of settings that is read from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data.config import SETTINGS, SYNTHETIC, DataConfig
from qrag_jax.data.generators.synthetic import SyntheticConfig
from qrag_jax.data.sources import own
from qrag_jax.environments.chunks_config import ChunksConfig
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import EvalConfig
from qrag_jax.feedback.deferred_reward import DeferredReward
from qrag_jax.feedback.ground_truth import ANSWER_IN_CHUNK, GROUND_TRUTH, FactReward
from qrag_jax.feedback.language_model import METRICS, ModelReward
from qrag_jax.feedback.own_reward import OWN, OwnReward
from qrag_jax.learners.imitation import ImitateConfig
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.learners.pqn import PQNConfig
from qrag_jax.llm.served_config import LlmConfig
from qrag_jax.llm.server.server_config import ServerConfig
from qrag_jax.models.encoder_config import LEFT_OPEN, EncoderConfig
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.scratch import ScratchConfig
from qrag_jax.policies.document_scores import LEAST_BLOCK
from qrag_jax.policies.soft_q import SoftQConfig
from qrag_jax.retrieval.chunk_positions import NO_POSITIONS
from qrag_jax.retrieval.paths import BeamConfig
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime import saved_config
from qrag_jax.runtime.config_fields import described, fill, internal, refusing_types, section
from qrag_jax.runtime.log_config import LogConfig
from qrag_jax.runtime.minilm import MINILM_OR_SCRATCH
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.runtime_config import RuntimeConfig
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.runtime.train_config import TrainConfig
from qrag_jax.systems.data_section import data_section, described_sources, fill_data

ALIASES = {"gt": GROUND_TRUTH}  # other names for values of config.reward.name
SECTIONS: dict[str, type] = {
    "encoder": EncoderConfig,
    "env": ChunksConfig,
    "policy": SoftQConfig,
    "pqn": PQNConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "runtime": RuntimeConfig,
    "log": LogConfig,
}
# Sections that only some configs need. Each one comes after the section that contains it.
OPTIONAL: dict[str, type] = {
    "imitate": ImitateConfig,
    "encoder.scratch": ScratchConfig,
    "data.synthetic": SyntheticConfig,
    "data.columns": own.Columns,
    "llm": LlmConfig,
    "llm.server": ServerConfig,
}
# Fields that do not change what a run computes: a resumed run may have other values.
FREE_FIELDS = (
    *saved_config.FREE_FIELDS,
    "data.cache",
    "eval.batch_size",
    "eval.beam",
    "eval.stop_threshold",
    "reward.prompt",
    "reward.path",
    "reward.max_failure_share",
)
IMITATE, PQN = STAGES = ("imitate", "pqn")  # in this order
FIELDS: dict[str, tuple[Any, str]] = {
    "seed": (42, "of the shuffle, the policy's draws and random weights"),
    "stages": ((PQN,), "what is done, one after the other: imitate, pqn, or both"),
    "profile": (0, "steps traced into workdir/profile after the first two of a start, 0: none"),
}


@dataclasses.dataclass(frozen=True)
class QRagConfig:
    """The settings of a config, one dataclass for each section.

    Attributes:
        llm: settings of the language model that gives the rewards; None if the supporting facts
            give them, or if the run is only scored.
        imitate: settings of imitation; None if it is none of the stages.
        imitated: steps of imitation, with which the run begins.
    """

    seed: int
    profile: int
    stages: tuple[str, ...]
    encoder: EncoderConfig
    data: DataConfig
    env: ChunksConfig
    policy: SoftQConfig
    reward: FactReward
    pqn: PQNConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    eval: EvalConfig
    runtime: RuntimeConfig
    log: LogConfig
    imitate: ImitateConfig | None = None
    llm: LlmConfig | None = None
    imitated: int = internal(0)

    @classmethod
    @refusing_types("the config")
    def of(cls, config: ConfigDict, *, scoring: bool = False) -> QRagConfig:
        """Reads the settings of a config.

        Args:
            scoring: the run is not trained further, so it needs no language model.

        Raises:
            InputError: a field is unknown, or its value is wrong for any data.
        """
        known = {*FIELDS, *SECTIONS, "system", "imitate", "data", "reward", "llm"}
        if unknown := sorted(set(config) - known):
            raise InputError(f"config.{unknown[0]!s:.60} is unknown; there are {', '.join(known)}.")
        parts: dict[str, Any] = {
            name: fill(kind, config[name], name) for name, kind in SECTIONS.items()
        }
        reward = dict(config.reward.items())
        reward["name"] = ALIASES.get(reward["name"], reward["name"])
        by_model = _asks_model(reward["name"])
        parts["pqn"] = dataclasses.replace(parts["pqn"], alpha=parts["policy"].alpha)
        stages = tuple(config.stages)
        if not stages or stages != tuple(each for each in STAGES if each in stages):
            raise InputError(
                f"config.stages is {', '.join(map(str, stages)) or 'empty'}; use imitate, pqn, or "
                "imitate,pqn."
            )
        steps = parts["train"].steps if PQN in stages else 0
        imitate = fill(ImitateConfig, config.imitate, "imitate") if IMITATE in stages else None
        if imitate and imitate.shared_by > 1 and parts["env"].positions != NO_POSITIONS:
            raise InputError(
                f"config.imitate.shared_by is {imitate.shared_by}, but passages of another "
                "question have no place in a document: set config.env.positions to "
                f"{NO_POSITIONS} (it is {parts['env'].positions})."
            )
        imitated = imitate.steps if imitate else 0
        parts["train"] = dataclasses.replace(parts["train"], steps=imitated + steps)
        total = {"total_steps": max(steps, 1)}
        parts["optimizer"] = dataclasses.replace(parts["optimizer"], **total)
        llm = dict(config.llm.items()) if by_model and not scoring else {}
        if llm.get("url"):
            llm.pop("server", None)  # no server is started
        if config.profile < 0:
            raise InputError(f"config.profile is {config.profile}; it must be at least 0.")
        if scoring and not parts["env"].max_steps:
            raise InputError(
                "config.env.max_steps is 0, which only training settles by its questions; give the "
                "run's own number."
            )
        data = fill_data(config.data)
        if data.negatives.index and parts["env"].positions != NO_POSITIONS:
            raise InputError(
                "config.data.negatives.index is given, but passages of an index have no place in a "
                f"document: set config.env.positions to {NO_POSITIONS} (it is "
                f"{parts['env'].positions})."
            )
        return cls(
            seed=config.seed,
            profile=config.profile,
            stages=stages,
            imitate=imitate,
            imitated=imitated,
            data=data,
            reward=fill(_reward_kind(reward["name"]), reward, "reward"),
            llm=fill(LlmConfig, llm, "llm") if llm else None,
            **parts,
        )

    def host_batch(self, stage: str, devices: int, hosts: int) -> int:
        """Number of questions per optimizer step of a stage on one host.

        Raises:
            InputError: the batch does not split evenly.
        """
        if stage == PQN or self.imitate is None:
            return self.train.host_batch(devices, hosts)
        size, parts = self.imitate.batch_size, devices * self.train.accumulation
        if size % (least := parts * self.imitate.shared_by):
            raise InputError(
                f"config.imitate.batch_size is {size}, which does not split into {parts} equal "
                "parts (devices × config.train.accumulation) of whole groups of "
                f"config.imitate.shared_by, {self.imitate.shared_by}; use a multiple of {least}."
            )
        return size // hosts

    @property
    def imitating(self) -> OptimizerConfig:
        """How imitation's optimizer differs from the other one: its own peak and length."""
        assert self.imitate is not None
        steps = self.imitate.steps
        return dataclasses.replace(
            self.optimizer,
            learning_rate=self.imitate.learning_rate,
            warmup_steps=min(self.optimizer.warmup_steps, steps // 10),
            total_steps=steps,
        )

    @property
    def is_ground_truth(self) -> bool:
        """Whether rewards come from the supporting facts."""
        return self.reward.name == GROUND_TRUTH

    @property
    def is_on_device(self) -> bool:
        """Whether rewards come from arrays, so that an update is one program."""
        return not isinstance(self.reward, DeferredReward)

    @property
    def rollout(self) -> RolloutConfig:
        """The static settings of playing episodes.

        If the rewards are not those of the supporting facts, these do not end an episode. Of a
        language model's rewards `feedback.completion` says what ends it.
        """
        return RolloutConfig(
            max_steps=self.env.max_steps,
            never_terminate=self.env.never_terminate or not self.is_ground_truth,
            sort_by_index=self.env.sort_by_index,
            max_chunk_tokens=self.data.max_chunk_tokens,
            max_chunk_tokens_in_state=self.data.max_chunk_tokens_in_state,
            top_k_actions=self.policy.top_k_actions,
            positions=self.env.positions,
            stop_action=self.env.stop_action,
        )

    @property
    def beam(self) -> BeamConfig:
        """How evaluation searches actions."""
        return BeamConfig(
            beam=self.eval.beam,
            score=self.eval.beam_score,
            gamma=self.pqn.gamma,
            alpha=self.policy.alpha,
            top_k_actions=min(self.policy.top_k_actions, LEAST_BLOCK),
            stop_threshold=self.eval.stop_threshold,
            batch_size=self.eval.batch_size,
        )

    @property
    def dev_data(self) -> DataConfig:
        """The data of evaluations: those of `eval.path` if it is given, else of `data.path`."""
        return self.data.at(self.eval.path)


def default_config(*sources: str) -> ConfigDict:
    """Q-RAG's settings for a Contriever-sized encoder (arXiv 2511.07328), on these data sources.

    Optional fields are there only if these settings need them: those of a language model, of
    invented questions and of an encoder from scratch. `complete` adds others later.
    """
    config = ConfigDict({"system": "q_rag"})
    for name, (value, _) in FIELDS.items():
        config[name] = value
    for name, kind in SECTIONS.items():
        config[name] = section(kind)
    config.data = data_section(sources)
    config.reward = section(FactReward)
    return complete(config)


def complete(config: ConfigDict, words: Sequence[str] = (), also: Iterable[str] = ()) -> ConfigDict:
    """Adds the optional fields that the values in a config and on a command line need.

    Args:
        words: words of the command line; only `--config.FIELD=VALUE` are read.
        also: optional sections to add in any case, such as "llm" and "llm.server".

    Raises:
        InputError: the command line gives a field that the config does not use.
    """
    given = _overrides(words)
    also = tuple(also)

    def chosen(name: str) -> Any:
        return given.get(name, _at(config, name))

    if given.get("reward.path") and given.get("reward.name", OWN) == OWN:
        config.reward.name = OWN  # the path alone says it
    reward = chosen("reward.name")
    wanted = _wanted(config, chosen)
    with config.unlocked():
        for name, kind in OPTIONAL.items():
            part, last = _part_of(config, name)
            if (wanted[name] or name in also) and part is not None and last not in part:
                part[last] = section(kind)
        for name, value in section(_reward_kind(reward)).items():
            if name not in config.reward:
                config.reward[name] = value
    for name in given:
        if name.startswith("data.columns.") and "columns" not in config.data:
            raise InputError(
                f"config.{name} is given, but the data are {', '.join(config.data.sources)}, whose "
                "fields have their own names; leave it out, or use --config=configs/own.py."
            )
        if name.startswith("imitate.") and "imitate" not in config:
            raise InputError(
                f"config.{name} is given, but config.stages has no imitate; give "
                "--config.stages=imitate or --config.stages=imitate,pqn."
            )
        if name.startswith("llm.") and "llm" not in config:
            raise InputError(
                f"config.{name} is given, but config.reward.name is {reward!r}, which asks no "
                f"language model; use one of {', '.join(METRICS)}."
            )
        if name.startswith("reward.") and name.partition(".")[2] not in config.reward:
            if name == "reward.path":
                raise InputError(
                    f"config.{name} is given, but config.reward.name is {reward!r}; leave one out."
                )
            if name.partition(".")[2] in section(ModelReward):
                raise InputError(
                    f"config.{name} is given, but config.reward.name is {reward!r}, which asks no "
                    f"language model; leave it out, or use one of {', '.join(METRICS)}."
                )
    return config


def prune(config: ConfigDict) -> ConfigDict:
    """Removes the optional fields that a config does not use.

    So two configs that do the same are equal.
    """
    wanted = _wanted(config, lambda name: _at(config, name))
    with config.unlocked():
        for name in reversed(OPTIONAL):
            part, last = _part_of(config, name)
            if not wanted[name] and part is not None and last in part:
                del part[last]
        for name in set(config.reward) - set(section(_reward_kind(config.reward.name))):
            del config.reward[name]
    return config


def add_missing_sections(config: ConfigDict, other: ConfigDict) -> None:
    """Adds the optional fields that `other` has and `config` lacks, with their defaults."""
    with config.unlocked():
        for name, kind in OPTIONAL.items():
            part, last = _part_of(config, name)
            if _at(other, name) is not None and part is not None and last not in part:
                part[last] = section(kind)
        for kind in (ModelReward, OwnReward):
            for name, value in section(kind).items():
                if name in other.get("reward", {}) and name not in config.reward:
                    config.reward[name] = value


def _wanted(config: ConfigDict, chosen: Callable[[str], Any]) -> dict[str, bool]:
    """Which of the optional sections a config needs; `chosen` gives the value of a field."""
    # BabiLong and needles make their own documents.
    official = [name for name in config.data.sources if name not in SETTINGS]
    paths = (chosen("data.path"), chosen("eval.path"))
    by_model = _asks_model(chosen("reward.name"))
    return {
        "imitate": IMITATE in chosen("stages"),
        "encoder.scratch": chosen("encoder.path") in ("", MINILM_OR_SCRATCH),
        "data.synthetic": SYNTHETIC in official or bool(official and SYNTHETIC in paths),
        "data.columns": own.NAME in official,
        "llm": by_model,
        "llm.server": by_model and not chosen("llm.url"),
    }


def load_config(path: Path) -> ConfigDict:
    """Reads the config of a run. Fields that the run does not read are dropped.

    Raises:
        InputError: the file is missing, is not a JSON object, or is not the config of a run.
    """
    saved = read_fields(path)
    if missing := [name for name in ("data", "train") if not isinstance(saved.get(name), dict)]:
        raise InputError(
            f"{path} has no section {missing[0]}, so it is not the config of a run; give the "
            "folder of a training."
        )
    with refusing_types(path):
        return prune(complete(ConfigDict(saved)))


def resume_config(given: ConfigDict, run: Run) -> None:
    """Fills the open fields of `given` from the saved config of the run, if the run has begun.

    Raises:
        InputError: the run has begun with another config.
    """
    if run.has_begun:
        saved = load_config(run.config_path)
        fill_from_saved(given, saved)
        run.check_config(saved, given, FREE_FIELDS, ("data.path", "eval.path"))


def settled(config: ConfigDict, encoder: TextEncoder) -> ConfigDict:
    """A copy of the config whose open fields have the values that `encoder` uses."""
    result = config.copy_and_resolve_references()
    for name in LEFT_OPEN:
        result.encoder[name] = getattr(encoder, name)
    return result


def fill_from_saved(config: ConfigDict, saved: ConfigDict) -> None:
    """Fills the open fields of `config` with the values that were settled when the run began."""
    for name in LEFT_OPEN:
        if config.encoder[name] == LEFT_OPEN[name]:
            config.encoder[name] = saved.encoder[name]
    config.env.max_steps = config.env.max_steps or saved.env.max_steps


def help_lines() -> list[tuple[str, Any, str]]:
    """Name, default and comment of every field that a config can have."""
    lines: list[tuple[str, Any, str]] = [(name, *about) for name, about in FIELDS.items()]
    more = {"imitate": ImitateConfig, "reward": ModelReward, "llm": LlmConfig}
    for name, kind in {**SECTIONS, **more}.items():
        lines += described(kind, name)
    lines += [line for line in described(OwnReward, "reward") if line[0] == "reward.path"]
    lines += described(DataConfig, "data") + described_sources()
    return sorted(lines, key=lambda line: line[0].split("."))


def _asks_model(reward: str) -> bool:
    names = (GROUND_TRUTH, *ALIASES, ANSWER_IN_CHUNK, *METRICS, OWN)
    if reward not in names:
        raise InputError(f"config.reward.name is {reward!r}; use one of {', '.join(names)}.")
    return reward in METRICS


def _reward_kind(reward: str) -> type[FactReward]:
    """The settings that a reward has."""
    if _asks_model(reward):
        return ModelReward
    return OwnReward if reward == OWN else FactReward


def _part_of(config: ConfigDict, name: str) -> tuple[ConfigDict | None, str]:
    """The section that a field is in (None if it does not exist), and the field's last name."""
    *sections, last = name.split(".")
    return (_at(config, ".".join(sections)) if sections else config), last


def _at(config: ConfigDict, name: str) -> Any:
    part: Any = config
    for word in name.split("."):
        if not isinstance(part, Mapping | ConfigDict) or word not in part:
            return None
        part = part[word]
    return part


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """The values of `--config.FIELD=VALUE` and `--config.FIELD VALUE`, as they are written."""
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name.startswith("config."):
            following = words[number + 1] if number + 1 < len(words) else ""
            found[name.removeprefix("config.")] = _unquoted(value if equals else following)
    return found


def _unquoted(text: str) -> str:
    """The text without the quotes around it, as ml_collections reads it."""
    for quote in "\"'":
        if len(text) >= 2 and text[0] == text[-1] == quote:
            return text[1:-1]
    return text
