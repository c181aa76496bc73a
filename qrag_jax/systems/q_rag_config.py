"""Q-RAG's config: its sections, and the dataclass of settings that is read from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data import sources as data_sources
from qrag_jax.data.config import (
    SETTINGS,
    DataConfig,
)
from qrag_jax.environments.chunks import ChunksConfig
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import EvalConfig
from qrag_jax.feedback.facts import ANSWER_IN_CHUNK, GROUND_TRUTH, FactReward
from qrag_jax.feedback.llm import METRICS, DeferredReward, ModelReward
from qrag_jax.feedback.own import OWN, OwnReward
from qrag_jax.learners.config import ImitateConfig, PQNConfig
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.llm.config import LlmConfig
from qrag_jax.models.encoder_config import LEFT_OPEN, EncoderConfig
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.policies.document_scores import LEAST_BLOCK
from qrag_jax.policies.soft_q import SoftQConfig
from qrag_jax.retrieval.paths import NO_POSITIONS, BeamConfig
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime import saved_config
from qrag_jax.runtime.config_fields import (
    fields_of,
    fill,
    internal,
    refusing_types,
)
from qrag_jax.runtime.mesh import RuntimeConfig
from qrag_jax.runtime.minilm import MINILM_OR_SCRATCH
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.train_config import LogConfig, TrainConfig
from qrag_jax.systems.config import COMMON, ConfigLayout, check_stages


@dataclasses.dataclass(frozen=True)
class RewardSection(OwnReward, ModelReward):
    """All fields of section `reward`; those of `_reward_kind` are read."""


ALIASES = {"gt": GROUND_TRUTH}  # other names for values of config.reward.name
SECTIONS: dict[str, type] = {
    "encoder": EncoderConfig,
    "env": ChunksConfig,
    "policy": SoftQConfig,
    "reward": RewardSection,
    "pqn": PQNConfig,
    "imitate": ImitateConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "runtime": RuntimeConfig,
    "log": LogConfig,
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
    **COMMON,
    "stages": ((PQN,), "what is done, one after the other: imitate, pqn, or both"),
}
LAYOUT = ConfigLayout("q_rag", FIELDS, SECTIONS, LlmConfig, later=("reward",), has_data=True)
default_config, help_lines = LAYOUT.default, LAYOUT.help_lines


@dataclasses.dataclass(frozen=True)
class QRagConfig:
    """The settings of a config, one dataclass for each section."""

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
    imitate: ImitateConfig | None = None  # settings of imitation; None if it is none of the stages
    # Settings of the language model that gives the rewards; None if the supporting facts give them,
    # or if the run is only scored
    llm: LlmConfig | None = None
    imitated: int = internal(0)  # steps of imitation, with which the run begins

    @classmethod
    @refusing_types("the config")
    def of(cls, config: ConfigDict, *, scoring: bool = False) -> QRagConfig:
        """Reads the settings of a config.

        Args:
            scoring: the run is not trained further, so it needs no language model.
        """
        parts = LAYOUT.parts(config)
        reward = _filled_reward(config.reward)
        by_model = isinstance(reward, ModelReward) and not scoring
        parts["pqn"] = dataclasses.replace(parts["pqn"], alpha=parts["policy"].alpha)
        stages = parts["stages"]
        check_stages(stages, STAGES)
        steps = parts["train"].steps if PQN in stages else 0
        imitate = parts["imitate"] = parts["imitate"] if IMITATE in stages else None
        imitated = imitate.steps if imitate else 0
        parts["train"] = dataclasses.replace(parts["train"], steps=imitated + steps)
        total = {"total_steps": max(steps, 1)}
        parts["optimizer"] = dataclasses.replace(parts["optimizer"], **total)
        if scoring and not parts["env"].max_steps:
            raise InputError(
                "config.env.max_steps is 0, which only training settles by its questions; give the "
                "run's own number."
            )
        foreign = {
            "imitate.shared_by": imitate is not None and imitate.shared_by > 1,
            "data.negatives.index": bool(parts["data"].negatives.index),
        }
        if parts["env"].positions != NO_POSITIONS and any(foreign.values()):
            name = next(name for name, is_used in foreign.items() if is_used)
            raise InputError(
                f"config.{name} brings passages of other documents, which have no place in a "
                f"document: set config.env.positions to {NO_POSITIONS} (it is "
                f"{parts['env'].positions})."
            )
        return cls(
            imitated=imitated,
            reward=reward,
            llm=LAYOUT.llm_settings(config) if by_model else None,
            **parts,
        )

    def host_batch(self, stage: str, devices: int, hosts: int) -> int:
        """Number of questions per optimizer step of a stage on one host."""
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
        language model's rewards `feedback.llm` says what ends it.
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


def unread(fields: Mapping[str, Any]) -> list[str]:
    """Sections and fields that a run with these values does not read."""
    # BabiLong and needles make their own documents.
    sources = {name.split(".")[2] for name in fields if name.startswith("data.sources.")}
    official, kind = sources - SETTINGS.keys(), _reward_kind(_name_of(fields, "reward."))
    by_model = kind is ModelReward
    read = {
        "imitate": IMITATE in fields["stages"],
        "encoder.scratch": fields["encoder.path"] in ("", MINILM_OR_SCRATCH),
        "data.columns": data_sources.OWN in official,
        "llm": by_model,
        "llm.server": by_model and not fields["llm.url"],
    }
    of_reward = {f"reward.{each.name}" for each in fields_of(kind)}
    others = [name for name in fields if name.startswith("reward.") and name not in of_reward]
    return [*(name for name, is_read in read.items() if not is_read), *others]


def load_config(path: Path) -> ConfigDict:
    """Reads the config of a run."""
    saved = LAYOUT.load(path)
    if missing := [
        name for name in ("data", "train") if not isinstance(saved.get(name), ConfigDict)
    ]:
        raise InputError(
            f"{path} has no section {missing[0]}, so it is not the config of a run; give the "
            "folder of a training."
        )
    return saved


def resume_config(given: ConfigDict, run: Run) -> None:
    """Fills the open fields of `given` from the saved config of the run, if the run has begun."""
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


def _filled_reward(given: ConfigDict) -> FactReward:
    """The settings of the reward; fields that it does not have are not read."""
    known = {field.name for field in fields_of(RewardSection)}
    if unknown := sorted(set(given) - known):
        raise InputError(f"config.reward.{unknown[0]} is unknown; there are {', '.join(known)}.")
    name = _name_of(given)
    kind = _reward_kind(name)
    read = {field.name for field in fields_of(kind)}
    fields = {each: value for each, value in given.items() if each in read}
    return fill(kind, fields | {"name": name}, "reward")


def _name_of(fields: Mapping[str, Any], prefix: str = "") -> str:
    """The reward's name; a path alone says that it is a function of the user's own."""
    name = fields[f"{prefix}name"]
    name = ALIASES.get(name, name)
    return OWN if name == GROUND_TRUTH and fields.get(f"{prefix}path") else name


def _reward_kind(reward: str) -> type[FactReward]:
    """The settings that a reward has."""
    names = (GROUND_TRUTH, *ALIASES, ANSWER_IN_CHUNK, *METRICS, OWN)
    if reward not in names:
        raise InputError(f"config.reward.name is {reward!r}; use one of {', '.join(names)}.")
    if reward in METRICS:
        return ModelReward
    return OwnReward if reward == OWN else FactReward
