"""RLVR (github.com/bdsaglam/rlvr): a language model learns to search with tools, by GRPO.

The model is the policy; the tools over each question's documents are the environment. A stage of
imitation may come before that of rewards. A run is scored by a trained checkpoint, by the weights
at the end of imitation if they are kept, and by the untrained ones, with several retrievers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.algorithms.policy_gradient import DR_GRPO
from qrag_jax.data import reading, sample
from qrag_jax.environments import queries, tool_functions
from qrag_jax.environments.episode import Closed, ToolTask
from qrag_jax.environments.tasks import bridge_task, tasks_of
from qrag_jax.environments.tools import ToolAgent
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.evaluators.evaluation import Evaluation, sampler
from qrag_jax.feedback.rewards import OWN_CAUSES
from qrag_jax.feedback.rubric import OWN_PATH, Rubric, reward_of, score
from qrag_jax.learners.state import TrainState
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.metrics.bootstrap import columns_of, means
from qrag_jax.metrics.row_log import PREDICTIONS, TOOL_EPISODES, Prediction, scored_episodes
from qrag_jax.rollouts import libraries, token_episodes
from qrag_jax.rollouts.token_episodes import Episode, Library, facts_of
from qrag_jax.rollouts.trajectories import REWARD, TRUNCATED, TokenTrajectory
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems import scoring, token_system
from qrag_jax.systems.config import refuse
from qrag_jax.systems.rlvr.config import GRPO, RlvrConfig
from qrag_jax.systems.scoring import Logs, Predictor, ScoreOptions, Way
from qrag_jax.systems.search import open_search
from qrag_jax.systems.token_config import BRIDGE

_LOG = "tools.log"  # what the user's functions print
SEARCH = "search"  # corpus and index, in the run's folder, where hosts have no common cache


def open_library(config: RlvrConfig, workdir: Path, mesh: Mesh, engine: str = "") -> Library:
    """What the tools read; by default with the engine of the config."""
    how: Any = {"engine": engine or config.search.engine, "clean": config.tasks.clean}
    search = dataclasses.replace(config.search, **how)
    return open_search(search, None, workdir, of_each=mesh, reranker=config.reranker)


def load_inputs(
    config: RlvrConfig, workdir: Path, mesh: Mesh, *, trains: bool = True
) -> token_system.TokenInputs:
    """Reads the questions, prepares the model, and cuts its chat template."""
    tools, asked = config.tools, config.questions
    functions = None
    if tools.path:
        limits: Any = {"seconds": tools.seconds, "most": tools.result_chars}
        functions = tool_functions.ToolFunctions(tools.path, workdir / _LOG, **limits)
    agent = ToolAgent(
        prompts.load(tools.prompt),
        form=tools.form,
        tools=tools.tools,
        max_turns=tools.max_turns,
        top_n=tools.top_n,
        most=tools.most,
        functions=functions.schemas if functions else (),
    )
    library = open_library(config, workdir / SEARCH, mesh)
    questions: dict[str, list[Any]] = {}  # the questions that are made here

    def read(split: sample.Split, text: str, count: int) -> list[ToolTask]:
        if text != BRIDGE:
            return tasks_of(token_system.read_samples(text), config.tasks)
        questions[split] = sample.world().bridge_questions(asked.bridge_seed, split, range(count))
        return [*map(bridge_task, questions[split])]

    dev: Sequence[ToolTask] = read("dev", asked.dev, asked.bridge_dev)
    train: Sequence[ToolTask] = ()
    if trains or asked.train == BRIDGE:  # whose texts a tiny model's tokenizer is trained on
        train = read("train", asked.train, asked.bridge_train)
    train = reading.without_asked(train, dev) if trains else ()
    bridge = questions.get("train", ())
    corpus = library.corpus if isinstance(library, libraries.CorpusLibrary) else None
    if corpus is not None:
        train, dev = libraries.on_corpus(train, corpus), libraries.on_corpus(dev, corpus)

    # A server tells no digest of what it searches.
    searched = config.search.index if corpus is None else corpus.digest
    return token_system.token_inputs(
        config,
        workdir,
        mesh,
        turn=tools.turn_tokens,
        train=train,
        dev=dev,
        digest=digest_of,
        agent=agent,
        asks=lambda task: [agent.opening(task.question)],
        sampled=1,
        library=library,
        functions=functions,
        script=queries.demonstration_scripts().ToolScript(bridge) if bridge else None,
        data={"prompt": agent.prompt.fingerprint, **({"corpus": searched} if searched else {})},
    )


def digest_of(tasks: Sequence[ToolTask]) -> str:
    """A digest of the questions, their gold answers and their documents."""
    return token_system.fingerprint(
        (t.id, t.question, t.answers, *map(tuple, t.documents)) for t in tasks
    )


_WHY = "message"  # among the facts of an episode for which a user's rubric gave no reward
_OF_CALLS = ("calls", "failed_calls")  # counts of an episode
# What the line on the screen tells of an episode with tools; of others it tells everything.
_SHOWN = ("em", "f1", "recall", "citation", REWARD, "turns", "completed", "malformed")
_PREDICTED = 2**31 - 4  # in place of a step's number: no step has it, and no evaluation
# Sections of the config that episodes of given weights do not depend on. The questions have a
# digest of their own.
_OF_TRAINING = (
    *("train", "optimizer", "runtime", "profile"),
    *("sft", "grpo", "stages", "eval", "questions", "llm"),
)


def episode_columns(
    parts: Mapping[str, float], tally: Mapping[str, Any], status: str
) -> dict[str, float]:
    """The parts of the reward of an episode, and its counts."""
    row = {**parts, "turns": float(tally["turns"]), "truncated": float(status == TRUNCATED)}
    if "searches" in tally:  # with our own tools
        row["searches"], row["completed"] = float(tally["searches"]), float(tally["completed"])
        row["malformed"] = float(tally["malformed"] + tally["unknown_tool"])
        row["calls"] = float(tally["calls"])
        row["failed_calls"] = float(tally["failed_calls"])
    return row | {"sampled_tokens": float(tally["sampled_tokens"])}


class ToolSystem(token_system.TokenSystem[RlvrConfig]):
    """What RLVR has with our own tools and in an environment of verifiers."""

    TITLE, LEARNED = "RLVR", "search with tools"
    SETTINGS, OF_QUESTIONS = RlvrConfig, ("questions.", "tasks.")

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        tasks, settings = self.inputs.dev, self.config.eval
        keys, numbers = self.keys(token_system.EVALUATED, len(tasks), 1), range(len(tasks))
        played = self.rewarded(state.params, tasks, numbers, keys, stop, greedy=settings.greedy)
        best_by = REWARD if self.config.env.verifiers else settings.best_by
        rows = []
        for t in played:
            if REWARD in t.parts:
                sampled = sum(len(turn.sampled) for segment in t.segments for turn in segment)
                tally = {**t.facts["tally"], "sampled_tokens": sampled}
                rows.append(episode_columns(t.parts, tally, t.status))
        unused = () if self.config.tools.path else _OF_CALLS  # always 0
        columns = {name: column for name, column in columns_of(rows).items() if name not in unused}
        scores = {best_by: 0.0, REWARD: 0.0} | means(columns)
        scores["failed_share"] = 1 - len(rows) / len(played) if played else 0.0
        shown = (*_SHOWN, "failed_share") if "searches" in scores else [*scores]
        values = ", ".join(f"{name} {scores[name]:.3f}" for name in shown)
        line = f"step {step}: {values} on {len(played)} questions"
        places = range(len(played))
        kept = sampler(PREDICTIONS, places, lambda n: self.row(played[n], tasks[n]))
        return Evaluation.of(line, scores, best_by, columns, episodes=kept)

    def _counted(self, counts: token_episodes.Counts) -> dict[str, float]:
        return {
            "turns_per_batch": counts.turns / max(counts.batches, 1),
            "failed_episodes": float(counts.failed),
        }

    def row(self, trajectory: TokenTrajectory, task: ToolTask) -> Prediction:
        """An episode as files of predictions have it."""
        return Prediction(
            id=task.id,
            question=task.question,
            answers=[*task.answers],
            hops=task.hops,
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

    @cached_property
    def _token_text(self) -> Callable[[int], str]:
        return functools.cache(lambda token: self._decoded([token]))

    def _decoded(self, ids: list[int]) -> str:
        return self.inputs.speech.tokenizer.decode(ids, skip_special_tokens=False)

    # ---------------------------------------------------------------- a run is scored

    def plays(
        self, raw: ConfigDict, options: ScoreOptions, stop: StopSignal, retriever: str = ""
    ) -> dict[str, Any]:
        """What plays `options.sampled` episodes of each question; 0: one, as `config.eval` says.

        `retriever`: of the tool that searches; "": the config's own.
        """
        config, inputs, engine = self.config, self.inputs, self.config.search.engine
        name, library = retriever or engine, None
        if config.env.verifiers and options.retrievers:
            raise InputError(
                f"--retrievers={','.join(options.retrievers)} is for questions of our own, and the "
                f"run's environment is {config.env.verifiers!r}; leave it out."
            )
        if config.env.verifiers:
            name = "predictions"
        else:
            folder, library = self.workdir / SEARCH, inputs.library
            library = library if name == engine else open_library(config, folder, self.mesh, name)
        draws, greedy = options.sampled or 1, not options.sampled and config.eval.greedy
        by: Any = {"greedy": greedy, "library": library}

        def play(params: Any, tasks: Sequence[ToolTask], first: int) -> list[Prediction]:
            # The draws depend on the numbers of the question and of the draw alone.
            key = jax.random.fold_in(jax.random.key(config.seed), _PREDICTED)
            numbers = range(first, first + len(tasks))
            keys = np.asarray(token_episodes.draw_keys(key, np.array(numbers, np.uint32), draws))
            played = self.rewarded(params, tasks, numbers, keys, stop, **by)
            return [self.row(trajectory, tasks[n // draws]) for n, trajectory in enumerate(played)]

        used = {n: v for n, v in raw.to_dict().items() if n not in _OF_TRAINING}
        record = {
            "kind": TOOL_EPISODES,
            "questions": len(inputs.dev),
            "sampled": options.sampled,
            "greedy": greedy,
            "data": inputs.data,
            "asked": token_system.fingerprint((task.id,) for task in inputs.dev),
            "rewards": {**self.provenance},
            "retriever": name,
            "config": used | {"search": used["search"] | {"engine": name}},
        }
        # As many episodes side by side as in training, whose memory is known to suffice.
        size = max(1, config.train.batch_size * config.grpo.members // draws)
        how = {"size": size, "draws": draws, "play": play, "record": record, "name": name}
        return {"rows": PREDICTIONS, "asked": inputs.dev, **how}

    def ways(self, predictor: Predictor) -> Iterator[Way]:
        options, how = predictor.options, (predictor.raw, predictor.options, predictor.stop)
        # All are refused before anything is played.
        players = [
            dataclasses.replace(predictor, **self.plays(*how, retriever))
            for retriever in options.retrievers
        ]
        for weights in predictor.ways(options.checkpoint):
            for player in players or [predictor]:
                yield player.way(weights, f"{weights.name}/{player.name}")

    def summary(self, predictor: Predictor, logs: Logs) -> tuple[dict[str, Any], list[str]]:
        """Scores and gains by the retriever, then by the weights."""
        from qrag_jax.metrics.summaries import episode_gains, episode_summary, episode_table

        by_name, main = dict[str, dict[str, Path]](), logs[0][0]
        for label, path in logs:
            by_name.setdefault(path.stem, {})[label] = path
        scores, gains, files = (dict[str, dict[str, Any]]() for _ in range(3))
        for name, paths in by_name.items():
            rows = {label: scored_episodes(log) for label, log in paths.items()}
            both = scoring.compared(rows, main, episode_summary, episode_gains)
            scores[name], gains[name] = both["scores"], both["gains"]
            # Each log is in the folder of its weights, in that of all.
            files[name] = {label: f"{log.parent.name}/{log.name}" for label, log in paths.items()}
        shown, differences = (
            {f"{name}, {label}": row for name in by_name for label, row in tree[name].items()}
            for tree in (scores, gains)
        )
        lines = episode_table(shown, differences)
        about = {"retriever": next(iter(by_name)), "weights": main}
        return {"main": about, "scores": scores, "gains": gains, "files": files}, lines


@dataclasses.dataclass(kw_only=True)
class Rlvr(ToolSystem):
    LOAD = staticmethod(load_inputs)

    @classmethod
    def played_by(cls, raw: ConfigDict) -> type[Any]:
        """With our own tools, or in an environment."""
        if not raw.get("env", {}).get("verifiers", ""):
            return cls
        from qrag_jax.systems.rlvr.environment import EnvironmentRlvr

        return EnvironmentRlvr

    @classmethod
    def check(cls, raw: ConfigDict) -> None:
        """`grpo.longest` is checked here, since no scoring of a run reads it."""
        config = RlvrConfig.of(raw)
        turns = config.env.max_turns if config.env.verifiers else config.tools.max_turns
        room = config.sampling.room
        most = min(turns * config.tools.turn_tokens, config.env.max_tokens or room, room)
        grpo = config.grpo
        short = GRPO in config.stages and grpo.aggregation == DR_GRPO and grpo.longest < most
        why = (
            f"and an episode may sample {most} tokens (its {turns} turns of "
            "config.tools.turn_tokens, within config.sampling.room); raise it"
        )
        refuse(config, (short, "grpo.longest", why))

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self._rubric, self._unscored = config.rubric.load(), 0
        self._calls = Counter[str]()  # of the user's functions, in episodes that are learned from
        if config.tasks.easy_first:
            train = inputs.train
            self.first_epoch = sorted(range(len(train)), key=lambda number: train[number].hops)
        if not isinstance(code := self._rubric, Rubric):
            self.provenance = {OWN_PATH: f"{code.spec} {code.digest}"}
            log(f"rewards by {code.spec}, which runs in this process, without a sandbox")
        if functions := inputs.functions:
            self.provenance[tool_functions.PATH] = f"{config.tools.path} {functions.digest}"
            names = ", ".join(schema["function"]["name"] for schema in functions.schemas)
            log(f"tools of {config.tools.path}, in a process without a sandbox: {names}")
        self.line = (
            f"{len(inputs.train)} training questions, {len(inputs.dev)} scored every "
            f"{self.train.eval_every} steps; {self.steps}, a step of grpo by "
            f"{config.train.batch_size} questions × {config.grpo.members} episodes; tools over "
            f"{config.search.index or config.search.corpus or 'own documents'} by "
            f"{config.search.engine}, {self._where}"
        )

    def _played(self, *how: Any) -> list[TokenTrajectory]:
        trajectories, most = super()._played(*how), self.config.tools.max_failed_share
        lost = [trajectory for trajectory in trajectories if trajectory.status in OWN_CAUSES]
        self._unscored += len(lost)
        for trajectory in trajectories:
            self._calls.update({name: trajectory.facts["tally"][name] for name in _OF_CALLS})
        if len(lost) > most * len(trajectories):
            raise FeedbackLost(
                f"{len(lost)} of {len(trajectories)} episodes have no reward (for example: "
                f"{lost[0].facts[_WHY]}); mend it, or raise config.tools.max_failed_share"
            )
        return trajectories

    def trajectory(
        self, episode: Episode, of: tuple[int, int], task: ToolTask, *more: Any
    ) -> TokenTrajectory:
        ended, parts, status = episode.ended, {}, episode.status
        facts = facts_of(ended)
        if isinstance(ended, Closed):
            measured = score(ended, task)
            reward = reward_of(self._rubric, ended, task, measured)
            if isinstance(reward, Failure):
                status, facts = reward.cause, {**facts, _WHY: reward.message}
            else:
                parts = measured | {REWARD: reward}
        return TokenTrajectory(*of, episode.attempts, episode.segments, status, parts, facts)

    def _counted(self, counts: token_episodes.Counts) -> dict[str, float]:
        unscored = {"unscored_episodes": float(self._unscored)} if self.config.rubric.path else {}
        called = {f"tool_{n}": float(self._calls[n]) for n in _OF_CALLS if self.config.tools.path}
        return super()._counted(counts) | unscored | called

    def close(self) -> None:
        if self.inputs.functions:
            self.inputs.functions.end()


SYSTEM = Rlvr
