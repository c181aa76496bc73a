"""Q-RAG's config: its sections, and what follows from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.data import sources as data_sources
from qrag_jax.data.loading import SETTINGS, DataConfig
from qrag_jax.environments.chunks import ChunksConfig
from qrag_jax.errors import Count, Natural, one_of, some_of, within
from qrag_jax.feedback.facts import GROUND_TRUTH
from qrag_jax.feedback.rewards import DEFERRED, METRICS, OWN, RewardConfig, reward_name
from qrag_jax.learners.config import ImitateConfig, PQNConfig
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.llm.config import LlmConfig
from qrag_jax.models import embedding, first_encoder
from qrag_jax.policies.soft_q import LEAST_BLOCK, SoftQConfig
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime import config_fields, pretrained_files
from qrag_jax.runtime.config_fields import internal
from qrag_jax.runtime.retriever_config import BEAM_SCORES, NO_POSITIONS, Search
from qrag_jax.systems.config import SystemConfig, refuse

UNTIL_FOUND = "return_until_found"
BEST_BY = ("return", UNTIL_FOUND)  # scores that choose the best checkpoint
IMITATE, PQN = STAGES = ("imitate", "pqn")  # in this order


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    path: str = ""  # data to evaluate on; "": the dev part of data.path
    samples: Natural = 500  # fixed questions scored during training, 0: all
    # The score whose mean chooses the best checkpoint: "return", of the full budget as in training,
    # or "return_until_found", 1 if all facts of a question are found (answer key, as in Q-RAG).
    best_by: Annotated[str, one_of(BEST_BY)] = "return"
    batch_size: Count = 32  # questions played at once
    # W, paths searched by qrag_jax.evaluate; 1 is greedy
    beam: Annotated[int, within(1, LEAST_BLOCK)] = 1
    # ranks paths: Σ log π (policy), Σ γ^t·Q (sum), last Q (last)
    beam_score: Annotated[str, one_of(BEAM_SCORES)] = "policy"
    # an episode ends before an action whose Q is not above it
    stop_threshold: float = dataclasses.field(
        default=-math.inf, metadata={"allow_inf_nan": True, "lt": math.inf}
    )
    seed: int = 42  # draws the scored questions; in the retrieval log's name

    @property
    def searches(self) -> bool:
        """Whether `qrag_jax.evaluate` also plays by beam search or with a stopping threshold."""
        return self.beam > 1 or self.stop_threshold > -math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class QRagConfig(SystemConfig):
    NAME: ClassVar[str] = "q_rag"
    FREE_FIELDS: ClassVar[tuple[str, ...]] = (
        *("data.cache", "eval.batch_size", "eval.beam", "eval.stop_threshold"),
        *("reward.prompt", "reward.path", "reward.max_failure_share"),
    )
    PATHS: ClassVar[tuple[str, ...]] = ("data.path", "eval.path")
    COMMANDS: ClassVar[tuple[str, ...]] = ("export", "index")
    FLAGS: ClassVar[tuple[str, ...]] = ("chunks",)
    EVALUATED_BY_MODEL: ClassVar[bool] = False
    # what is done, one after the other: imitate, pqn, or both
    stages: Annotated[tuple[str, ...], some_of(STAGES, ordered=True)] = (PQN,)
    encoder: first_encoder.EncoderConfig
    data: DataConfig
    env: ChunksConfig
    policy: SoftQConfig
    reward: RewardConfig
    pqn: PQNConfig
    imitate: ImitateConfig | None  # None if it is none of the stages
    eval: EvalConfig
    # The language model that gives the rewards; None if the supporting facts give them, or if the
    # run is only scored
    llm: LlmConfig | None
    imitated: int = internal(0)  # steps of imitation, with which the run begins

    def settled(self, *, scoring: bool = False) -> QRagConfig:
        """See `SystemConfig`; `scoring`: the run is not trained further, so it needs no model."""
        steps = self.train.steps if PQN in self.stages else 0
        imitate = self.imitate if IMITATE in self.stages else None
        imitated = imitate.steps if imitate else 0
        by_model = self.reward.name in METRICS and not scoring
        asks = f"config.reward.name {self.reward.name}"
        llm = self.llm.asked(asks) if by_model and self.llm else None
        shared = "imitate.shared_by" if imitate and imitate.shared_by > 1 else ""
        foreign = shared or ("data.negatives.index" if self.data.negatives.index else "")
        unsettled = "which only training settles by its questions; give the run's own number"
        others = (
            f"and config.{foreign} brings passages of other documents, which have no place in a "
            f"document; set it to {NO_POSITIONS}"
        )
        refuse(
            self,
            (scoring and not self.env.max_steps, "env.max_steps", unsettled),
            (foreign and self.env.positions != NO_POSITIONS, "env.positions", others),
        )
        return dataclasses.replace(
            self,
            imitate=imitate,
            imitated=imitated,
            train=dataclasses.replace(self.train, steps=imitated + steps),
            optimizer=dataclasses.replace(self.optimizer, total_steps=max(steps, 1)),
            pqn=dataclasses.replace(self.pqn, alpha=self.policy.alpha),
            llm=llm,
        )

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        # BabiLong and needles make their own documents.
        sources = {name.split(".")[2] for name in fields if name.startswith("data.sources.")}
        reward = reward_name(fields["reward.name"], fields["reward.path"])
        by_model = reward in METRICS
        read = {
            "imitate": IMITATE in fields["stages"],
            "encoder.scratch": fields["encoder.path"] in ("", pretrained_files.MINILM_OR_SCRATCH),
            "data.columns": data_sources.OWN in sources - SETTINGS.keys(),
            **dict.fromkeys((f"reward.{name}" for name in DEFERRED), by_model or reward == OWN),
            "reward.path": reward == OWN,
            "reward.prompt": by_model,
            "llm": by_model,
            "llm.server": by_model and not fields["llm.url"],
        }
        return [name for name, is_read in read.items() if not is_read]

    @classmethod
    def fill_open(cls, config: ConfigDict, saved: ConfigDict) -> None:
        for name in first_encoder.LEFT_OPEN:
            if config.encoder[name] == first_encoder.LEFT_OPEN[name]:
                config.encoder[name] = saved.encoder[name]
        config.env.max_steps = config.env.max_steps or saved.env.max_steps

    def host_batch(self, stage: str, devices: int, hosts: int) -> int:
        if stage == PQN or self.imitate is None:
            return self.train.host_batch(devices, hosts)
        size, parts = self.imitate.batch_size, devices * self.train.accumulation
        of = "devices × config.train.accumulation × config.imitate.shared_by"
        config_fields.check_split("imitate.batch_size", size, parts * self.imitate.shared_by, of)
        return size // hosts

    @property
    def imitating(self) -> OptimizerConfig:
        """How imitation's optimizer differs from the other one: its own peak and length."""
        assert self.imitate is not None
        steps = self.imitate.steps
        warmup, rate = min(self.optimizer.warmup_steps, steps // 10), self.imitate.learning_rate
        fields: Any = {"learning_rate": rate, "warmup_steps": warmup, "total_steps": steps}
        return dataclasses.replace(self.optimizer, **fields)

    @property
    def is_on_device(self) -> bool:
        """Whether rewards come from arrays, so that an update is one program."""
        return not self.reward.is_deferred

    @property
    def rollout(self) -> RolloutConfig:
        """How episodes are played; rewards but those of facts end none, or see `feedback.llm`."""
        goes_on = self.env.never_terminate or self.reward.name != GROUND_TRUTH
        return RolloutConfig(
            **vars(self.env) | {"never_terminate": goes_on},
            max_chunk_tokens=self.data.max_chunk_tokens,
            max_chunk_tokens_in_state=self.data.max_chunk_tokens_in_state,
            top_k_actions=self.policy.top_k_actions,
        )

    @property
    def beam(self) -> Search:
        return Search(
            max_steps=self.env.max_steps,
            beam=self.eval.beam,
            beam_score=self.eval.beam_score,
            gamma=self.pqn.gamma,
            alpha=self.policy.alpha,
            top_k_actions=min(self.policy.top_k_actions, LEAST_BLOCK),
            stop_action=self.env.stop_action,
            stop_threshold=self.eval.stop_threshold,
        )

    @property
    def dev_data(self) -> DataConfig:
        return self.data.at(self.eval.path)


def settled(config: ConfigDict, encoder: embedding.TextEncoder) -> ConfigDict:
    """A copy of the config whose open fields have the values that `encoder` uses."""
    result = config.copy_and_resolve_references()
    for name in first_encoder.LEFT_OPEN:
        result.encoder[name] = getattr(encoder, name)
    return result


CONFIG = QRagConfig
