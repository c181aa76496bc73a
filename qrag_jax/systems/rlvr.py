"""RLVR (github.com/bdsaglam/rlvr): a language model learns to search with tools, by GRPO.

The model is the policy; the tools over each question's documents are the environment. A stage of
imitation may come before that of rewards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.algorithms.policy_gradient import DR_GRPO
from qrag_jax.data.reading import without_asked
from qrag_jax.data.sample import Split
from qrag_jax.data.scripted import world
from qrag_jax.environments.demonstrations import scripts
from qrag_jax.environments.episode import Closed, ToolTask
from qrag_jax.environments.tasks import bridge_task, tasks_of
from qrag_jax.environments.tools import ToolAgent
from qrag_jax.errors import FeedbackLost
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.evaluators.token_scores import REWARD, tool_evaluation
from qrag_jax.feedback.rewards import OWN_CAUSES, Unscored
from qrag_jax.feedback.rubric import OWN_PATH, Rubric, reward_of, score
from qrag_jax.learners.state import TrainState
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.text import prompts
from qrag_jax.metrics.rows import Prediction
from qrag_jax.retrieval import own_documents
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.index_folder import BM25
from qrag_jax.rollouts.libraries import CorpusLibrary, OwnLibrary, on_corpus
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.token_episodes import Episode, Library, Talk, facts_of, scripted_talk
from qrag_jax.rollouts.trajectories import TokenTrajectory
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import DEV, Run, log
from qrag_jax.systems import token_system
from qrag_jax.systems.indexing import PassageEncoder
from qrag_jax.systems.rlvr_config import GRPO, RlvrConfig
from qrag_jax.systems.search import ServiceLibrary, open_index, prefixed
from qrag_jax.systems.token_config import BRIDGE, refuse

_WAIT = 60.0  # seconds that a search waits for a rerank service that is down
_READ_FOR_TOKENIZER = 600  # demonstrations on which a tiny model's tokenizer is trained


def open_library(config: RlvrConfig, mesh: Mesh, retriever: str = "") -> Library:
    """What the tools read; by default with the retriever of the config."""
    tools, retriever = config.tools, retriever or config.tools.retriever
    if tools.corpus:
        if tools.corpus.startswith(("http://", "https://")):
            return ServiceLibrary(tools.corpus)
        clean, section = config.tasks.clean, "config.tools"
        return open_index(tools.corpus, retriever, prefixed(tools), section, clean=clean)
    scorer: own_documents.Scorer | None = None
    if tools.rerank_url:
        prefix = "config.tools.rerank_"
        client = ClientConfig(tools.rerank_url, tools.rerank_model, wait_limit=_WAIT, prefix=prefix)
        scorer = own_documents.endpoint_scorer(Client(client))
    elif tools.encoder:
        encoder = PassageEncoder.of_folder(tools.encoder, prefixed(tools).config, mesh)
        scorer = own_documents.EmbeddingScorer(encoder, encoder.towers.chunks)
    return OwnLibrary(own_documents.OwnRetriever(retriever, scorer))


def load_inputs(
    config: RlvrConfig, workdir: Path, mesh: Mesh, *, trains: bool = True
) -> token_system.TokenInputs:
    """Reads the questions, prepares the model, and cuts its chat template."""
    tools, asked = config.tools, config.questions
    agent = ToolAgent(
        prompts.load(tools.prompt),
        form=tools.form,
        tools=tools.tools,
        max_turns=tools.max_turns,
        top_n=tools.top_n,
        most=tools.most,
    )
    library = open_library(config, mesh)
    made: dict[str, list[Any]] = {}  # the questions that are made here

    def read(split: Split, text: str, count: int) -> list[ToolTask]:
        if text != BRIDGE:
            return tasks_of(token_system.read_samples(text), config.tasks)
        made[split] = world().bridge_questions(asked.bridge_seed, split, range(count))
        return [*map(bridge_task, made[split])]

    dev: Sequence[ToolTask] = read("dev", asked.dev, asked.bridge_dev)
    train: Sequence[ToolTask] = ()
    if trains or asked.train == BRIDGE:  # whose texts a tiny model's tokenizer is trained on
        train = read("train", asked.train, asked.bridge_train)
    train = without_asked(train, dev) if trains else ()
    bridge = made.get("train", ())
    corpus = library.corpus if isinstance(library, CorpusLibrary) else None
    if corpus is not None:
        train, dev = _on_corpus(train, corpus), _on_corpus(dev, corpus)

    def texts() -> Iterator[str]:
        own, shown = OwnLibrary(own_documents.OwnRetriever(BM25)), bridge[:_READ_FOR_TOKENIZER]
        return token_system.spoken(scripted(config, agent, own, q, n) for n, q in enumerate(shown))

    longest = max((*train, *dev), key=lambda task: len(task.question))
    # A server tells no digest of what it searches.
    searched = {"corpus": corpus.digest if corpus else tools.corpus} if tools.corpus else {}
    return token_system.token_inputs(
        config,
        workdir,
        mesh,
        turn=tools.turn_tokens,
        texts=texts if bridge else None,
        prompts=[(longest.id, agent.opening(longest.question))],
        sampled=1,
        agent=agent,
        library=library,
        train=train,
        dev=dev,
        script=bridge,
        data={
            "questions": digest_of(train),
            DEV: digest_of(dev),
            "prompt": agent.prompt.fingerprint,
            **searched,
        },
    )


def _on_corpus(tasks: Sequence[ToolTask], corpus: StoredCorpus) -> list[ToolTask]:
    found = on_corpus(tasks, corpus)
    if without := sum(not task.gold_ids for task in found):
        log(
            f"{without} of {len(found)} questions have a gold document that is not in the corpus; "
            "their recall counts as 0, and citations as right"
        )
    return found


def scripted(
    config: RlvrConfig, agent: ToolAgent, library: Library, question: Any, index: int
) -> Talk:
    """Demonstration `index`, of this question."""
    choices = scripts().draw_choices(config.seed, index)
    script = scripts().Demonstration(question, choices, config.tools.form)
    return scripted_talk(agent, bridge_task(question), script, library)


def digest_of(tasks: Sequence[ToolTask]) -> str:
    """A digest of the questions, their gold answers and their documents."""
    return token_system.fingerprint(
        (t.id, t.question, t.answers, *map(tuple, t.documents)) for t in tasks
    )


_WHY = "message"  # among the facts of an episode for which a user's rubric gave no reward


class ToolSystem(token_system.BatchSystem[RlvrConfig]):
    """What RLVR has with our own tools and in an environment of verifiers."""

    # What each has:
    # (weights, questions, keys `[question, member, 2]`, stop, greedy=, library=) → episodes, those
    # of a question side by side; what the tools read is by default what they read in training
    episodes: Any
    # (episode, number of the question, its number among those of it, question) → trajectory, with
    # the parts of its reward; none if it, or a user's rubric, failed
    trajectory: Any
    _row: Any  # (trajectory, question, its episode) → the row of a log

    def _played(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        asked = [self.inputs.train[number] for number in numbers]
        keys = self.keys(step, len(asked), self.config.grpo.members)
        return [played for played, _ in self._rewarded(weights, asked, keys, stop, numbers=numbers)]

    def _rewarded(
        self,
        weights: Any,
        asked: Sequence[Any],
        keys: np.ndarray,
        stop: StopSignal,
        *,
        numbers: Sequence[int],
        **how: Any,
    ) -> list[tuple[TokenTrajectory, Episode]]:
        """Episodes of questions of these numbers, with their rewards; `how`: see `episodes`."""
        found = []
        for n, episode in enumerate(self.episodes(weights, asked, keys, stop, **how)):
            place, member = divmod(n, keys.shape[1])
            found.append((self.trajectory(episode, numbers[place], member, asked[place]), episode))
        return found

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        asked, settings = self.inputs.dev, self.config.eval
        keys = self.keys(token_system.EVALUATED, len(asked), 1)
        how: Any = {"numbers": range(len(asked)), "greedy": settings.greedy}
        played = [each for each, _ in self._rewarded(state.params, asked, keys, stop, **how)]
        best_by = REWARD if self.config.env.verifiers else settings.best_by

        def logged(places: Sequence[int]) -> list[Prediction]:
            return [self._row(played[place], asked[place]) for place in places]

        return tool_evaluation(step, played, best_by, logged)

    def predict(
        self,
        params: Any,
        asked: Sequence[Any],
        keys: np.ndarray,
        stop: StopSignal,
        *,
        first: int,
        **how: Any,
    ) -> list[Prediction]:
        """As `episodes`, as rows of a log; `first`: number of the first question."""
        numbers = range(first, first + len(asked))
        played = self._rewarded(params, asked, keys, stop, numbers=numbers, **how)
        return [self._row(e, asked[n // keys.shape[1]], by) for n, (e, by) in enumerate(played)]

    def _counted(self, counts: Counts) -> dict[str, float]:
        return {
            "turns_per_batch": counts.turns / max(counts.batches, 1),
            "failed_episodes": float(counts.failed),
        }

    @cached_property
    def _token_text(self) -> Callable[[int], str]:
        return functools.cache(lambda token: self._decoded([token]))

    def _decoded(self, ids: list[int]) -> str:
        return self.inputs.speech.tokenizer.decode(ids, skip_special_tokens=False)

    def _prediction(
        self,
        trajectory: TokenTrajectory,
        name: str,
        question: str,
        answers: Sequence[str] = (),
        hops: int = 0,
    ) -> Prediction:
        """An episode as files of predictions have it."""
        return Prediction(
            id=name,
            question=question,
            answers=[*answers],
            hops=hops,
            draw=trajectory.member,
            prediction=trajectory.facts.get("answer", ""),
            reward=trajectory.parts.get(REWARD),
            turns=[
                {
                    "segment": number,
                    "observed": self._decoded(turn.observed.tolist()),
                    "sampled": self.inputs.speech.text(turn.sampled),
                    "observed_tokens": [*map(self._token_text, turn.observed.tolist())],
                    "sampled_tokens": [*map(self._token_text, turn.sampled.tolist())],
                }
                for number, segment in enumerate(trajectory.segments)
                for turn in segment
            ],
            trajectory=trajectory.to_json(),
        )


@dataclasses.dataclass
class Rlvr(ToolSystem):
    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self._rubric, self._unscored = config.rubric.load(), 0
        if config.tasks.easy_first:
            train = inputs.train
            self.first_epoch = sorted(range(len(train)), key=lambda number: train[number].hops)
        if not isinstance(code := self._rubric, Rubric):
            self.provenance = {OWN_PATH: f"{code.spec} {code.digest}"}
            log(f"rewards by {code.spec}, which runs in this process, without a sandbox")
        self.line = (
            f"{len(inputs.train)} training questions, {len(inputs.dev)} scored every "
            f"{self.train.eval_every} steps; {self.steps}, a step of grpo by "
            f"{config.train.batch_size} questions × {config.grpo.members} episodes; tools over "
            f"{config.tools.corpus or 'own documents'} by {config.tools.retriever}, {self._where}"
        )

    # ---------------------------------------------------------------- episodes

    def _demonstration(self, number: int, index: int) -> Talk:
        inputs = self.inputs
        return scripted(self.config, inputs.agent, inputs.library, inputs.script[number], index)

    def episodes(
        self, weights: Any, asked: Sequence[ToolTask], keys: np.ndarray, *how: Any, **more: Any
    ) -> list[Episode]:
        return self.play(weights, token_system.starts_of(asked, keys), *how, **more)

    def _played(self, *how: Any) -> list[TokenTrajectory]:
        found, most = super()._played(*how), self.config.tools.max_failed_share
        lost = [each for each in found if each.status in OWN_CAUSES]
        self._unscored += len(lost)
        if len(lost) > most * len(found):
            raise FeedbackLost(
                f"{len(lost)} of {len(found)} episodes have no reward (for example: "
                f"{lost[0].facts[_WHY]}); mend it, or raise config.tools.max_failed_share"
            )
        return found

    def trajectory(
        self, episode: Episode, question: int, member: int, task: ToolTask
    ) -> TokenTrajectory:
        ended, parts, status = episode.ended, {}, episode.status
        facts = facts_of(ended)
        if isinstance(ended, Closed):
            measured = score(ended, task)
            reward = reward_of(self._rubric, ended, task, measured)
            if isinstance(reward, Unscored):
                status, facts = reward.cause, {**facts, _WHY: reward.message}
            else:
                parts = measured | {REWARD: reward}
        at = question, member, episode.attempts
        return TokenTrajectory(*at, episode.segments, status, parts, facts)

    def _row(
        self, trajectory: TokenTrajectory, task: ToolTask, episode: Episode | None = None
    ) -> Prediction:
        return self._prediction(trajectory, task.id, task.question, task.answers, task.hops)

    def _counted(self, counts: Counts) -> dict[str, float]:
        unscored = {"unscored_episodes": float(self._unscored)} if self.config.rubric.path else {}
        return super()._counted(counts) | unscored


before_devices = RlvrConfig.before_devices


def check(raw: ConfigDict) -> None:
    """See `Opening.check`; `grpo.longest` is checked here, since no scoring of a run reads it."""
    config = RlvrConfig.of(raw)
    turns = config.env.max_turns if config.env.verifiers else config.tools.max_turns
    room = config.sampling.room
    most = min(turns * config.tools.turn_tokens, config.env.max_tokens or room, room)
    grpo = config.grpo
    short = GRPO in config.stages and grpo.aggregation == DR_GRPO and grpo.longest < most
    why = (
        f"and an episode may sample {most} tokens (its {turns} turns of config.tools.turn_tokens, "
        "within config.sampling.room); raise it"
    )
    refuse(config, (short, "grpo.longest", why))


def open_system(raw: ConfigDict, run: Run, **how: Any) -> AbstractContextManager[Any]:
    """Opens the system: with our own tools, or in an environment of verifiers (config.env)."""
    if raw.get("env", {}).get("verifiers"):
        from qrag_jax.systems.rlvr_environment import EnvironmentRlvr, load_environment

        return token_system.open_token_system(
            EnvironmentRlvr, RlvrConfig, load_environment, raw, run, **how
        )
    return token_system.open_token_system(Rlvr, RlvrConfig, load_inputs, raw, run, **how)
