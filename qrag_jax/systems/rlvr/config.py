"""RLVR's config: its sections, and what follows from them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.environments.tasks import TasksConfig
from qrag_jax.environments.tool_functions import PATH as TOOLS_PATH
from qrag_jax.environments.tools import COMPLETE, RETRIEVE, TOOLS
from qrag_jax.errors import Count, InputError, Natural, Positive, Weight, one_of, some_of
from qrag_jax.feedback.rubric import OWN_PATH, PARTS, Rubric, own_rubric
from qrag_jax.learners.config import TokenGRPOConfig
from qrag_jax.llm.config import RerankerConfig
from qrag_jax.llm.text.tool_calls import FORMATS, HERMES
from qrag_jax.retrieval.bm25 import BM25Config
from qrag_jax.rollouts.trajectories import REWARD
from qrag_jax.runtime import own_code
from qrag_jax.runtime.config_fields import check_value
from qrag_jax.runtime.own_code import OwnCode
from qrag_jax.systems import token_config
from qrag_jax.systems.config import HalvedEvalConfig, refuse
from qrag_jax.systems.search import SearchConfig, unread

MADE = ".venv-verifiers"  # is looked for in the working folder; `make verifiers`


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    # Id of an installed environment; then config.questions, tasks and rubric are not read, and the
    # reward is its own. "": the questions and tools of the other sections
    verifiers: str = ""
    # The Python that has verifiers and the environment, which runs as it is, without a sandbox.
    # "": that of .venv-verifiers in this folder
    python: str = ""
    arguments: str = "{}"  # of the environment, or of its taskset, as a JSON object
    # Of the model in an episode; a further one is refused, and it is truncated
    max_turns: Count = 16
    max_tokens: Natural = 0  # sampled in an episode, likewise; 0: as many as there is room for
    seconds: Weight = 120.0  # that it may work on an episode, without the model's time; 0: no limit
    side_by_side: Count = 64  # episodes that are played at a time
    tasks: Natural = 0  # only so many of its first tasks; 0: all, of an endless taskset 1000
    # What talks with the model: direct (ours, in the environment's process), own (of the
    # taskset's package, else bash), or the id of another harness, such as null
    harness: str = "direct"

    def __post_init__(self) -> None:
        self.given()

    def given(self) -> dict[str, Any]:
        text = (self.arguments or "{}").encode()
        return check_value(dict[str, Any], text, "config.env.arguments")

    def interpreter(self) -> str:
        """The Python that has verifiers."""
        if self.python:
            return str(Path(self.python).expanduser().absolute())
        python = Path(MADE).absolute() / "bin" / "python"
        if os.access(python, os.X_OK):
            return str(python)
        if importlib.util.find_spec("verifiers") is not None:
            return sys.executable
        raise InputError(
            f"config.env.python is empty, and there is no {MADE} here; pip install "
            "'qrag_jax[verifiers]' into an environment of its own, and name the Python of that."
        )


SFT, GRPO = STAGES = ("sft", "grpo")


@dataclasses.dataclass(frozen=True)
class ToolsConfig(token_config.PlayedConfig):
    # get_document is a further one; complete must be there
    tools: Annotated[tuple[str, ...], some_of(TOOLS)] = (RETRIEVE, COMPLETE)
    form: Annotated[str, one_of(FORMATS)] = HERMES  # how calls are written: hermes or llama
    prompt: str = "rlvr_tools"  # the first prompt: a name of ours, or a file .txt of your own
    max_turns: Count = 10  # turns of the model
    top_n: Count = 2  # documents of a search that does not say how many
    most: Count = 20  # documents that a search may ask for
    turn_tokens: Count = 1024  # tokens that a turn may sample
    # FILE.py whose functions are tools, too; they run in a process of their own, without a sandbox
    path: str = ""
    seconds: Positive = 10.0  # that a call of such a function may take; then it has failed
    result_chars: Count = 2000  # characters of its result; the rest is cut off

    def __post_init__(self) -> None:
        if self.path and not self.path.endswith(own_code.SUFFIX):
            raise InputError(f"{TOOLS_PATH} is {self.path!r:.80}; write FILE.py.")


@dataclasses.dataclass(frozen=True)
class RubricConfig(Rubric):
    # FILE.py:FUNCTION of (question, answers, answer, parts), in place of the weighted sum; it runs
    # without a sandbox. "": the sum
    path: str = ""

    def __post_init__(self) -> None:
        if self.path:
            own_code.check_form(self.path, OWN_PATH)

    def load(self) -> Rubric | OwnCode:
        """What gives the rewards."""
        return own_rubric(self.path) if self.path else self


@dataclasses.dataclass(frozen=True)
class EvalConfig(HalvedEvalConfig):
    greedy: bool = False  # the likeliest tokens; False: sampled as in training
    # The score whose mean chooses the best checkpoint: a part, or reward; of an environment
    # (config.env) it is the reward
    best_by: Annotated[str, one_of((*PARTS, REWARD))] = "em"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlvrConfig(token_config.TokenConfig):
    NAME: ClassVar[str] = "rlvr"
    PLAYED: ClassVar[str] = "tools"
    IMITATION: ClassVar[str] = SFT
    TURNS: ClassVar[bool] = True
    UNTRAINED: ClassVar[tuple[str, ...]] = ("predict",)
    FLAGS: ClassVar[tuple[str, ...]] = ("retrievers", "sampled", "retriever")
    FREE_FIELDS: ClassVar[tuple[str, ...]] = (
        *("tools.max_failed_share", "tools.seconds"),
        *("env.python", "env.seconds", "env.side_by_side"),
    )
    PATHS: ClassVar[tuple[str, ...]] = (
        *("questions.train", "questions.dev", "search.index", "search.corpus", "model.path"),
    )
    # what is done, one after the other: sft, grpo, or both
    stages: Annotated[tuple[str, ...], some_of(STAGES, ordered=True)] = STAGES
    env: EnvironmentConfig
    questions: token_config.BridgeQuestionsConfig
    tasks: TasksConfig
    tools: ToolsConfig
    search: SearchConfig
    reranker: RerankerConfig
    rubric: RubricConfig
    sft: token_config.ScriptConfig
    grpo: TokenGRPOConfig
    eval: EvalConfig

    def settled(self) -> RlvrConfig:
        tools, shared = self.tools, self.search.index or self.search.corpus
        one = "and config.search.encoder names what scores, too; leave one of them empty"
        words = "and cannot search a corpus or an index; use an encoder or bm25, and leave it empty"
        few = f"less than config.tools.top_n, {tools.top_n}; raise it"
        theirs = "and the tools of config.env.verifiers are its own; leave one of them empty"
        no_end = f"and has no {COMPLETE}, by which an episode ends; name it, too"
        refuse(
            self,
            (COMPLETE not in tools.tools, "tools.tools", no_end),
            (tools.most < tools.top_n, "tools.most", few),
            (self.reranker.url and shared, "reranker.url", words),
            (self.reranker.url and self.search.encoder, "reranker.url", one),
            (tools.path and self.env.verifiers, "tools.path", theirs),
        )
        if SFT in self.stages:
            bridge = token_config.BRIDGE
            why = f"and sft demonstrates {bridge!r} on documents of their own; set stages to grpo"
            refuse(
                self,
                (self.env.verifiers, "env.verifiers", why),
                (self.questions.train != bridge, "questions.train", why),
                (self.search.corpus, "search.corpus", why),
                (self.search.index, "search.index", why),
            )
        return self.with_stages()

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        of_index = ("index", "corpus", "engine", "encoder", "question_prefix", "passage_prefix")
        own_documents = not (fields["search.index"] or fields["search.corpus"])
        further = () if own_documents else ("dtype", *vars(BM25Config()))
        reranker = [] if own_documents else ["reranker"]
        return [*super().unread(fields), *reranker, *unread(*of_index, *further)]

    @property
    def rule(self) -> TokenGRPOConfig:
        return self.grpo


def default_config() -> ConfigDict:
    """RLVR's settings (github.com/bdsaglam/rlvr, its last commit) on questions made here."""
    config = RlvrConfig.default()
    config.sft.steps = 600
    config.train.update(steps=120, batch_size=8, eval_every=60, checkpoint_every=60, log_every=5)
    config.optimizer.update(learning_rate=1e-5, beta2=0.99, clip_norm=0.1)
    config.optimizer.update(schedule="constant", warmup_steps=10)
    return config


CONFIG = RlvrConfig
