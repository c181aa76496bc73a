"""HARR (arXiv 2602.03645): GRPO or PPO trains a query encoder inside an agent that searches.

The agent and the document index do not change; the retriever is the policy, and the answer's score
is its reward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.data.loading import load_questions
from qrag_jax.data.sample import Sample, fingerprint
from qrag_jax.environments.episode import Agent, Closed, Failed, Task
from qrag_jax.environments.rag import PATH, OwnAgent, Planner, ReAct, Scripted, SearchR1
from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, of_all_hosts, sampler
from qrag_jax.feedback import rag
from qrag_jax.feedback.llm import JUDGE, metrics_of_all, verdict_of
from qrag_jax.feedback.rewards import Checks, Patience, Watch
from qrag_jax.learners.config import PPOConfig
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.query_encoder import QueryEncoder, make_query_update
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.llm.outcomes import Failure, Request
from qrag_jax.llm.text import generation, prompts
from qrag_jax.metrics import ranking
from qrag_jax.metrics.bootstrap import means, score_table
from qrag_jax.metrics.row_log import AGENTS, REWARDS, AgentRow
from qrag_jax.metrics.summaries import (
    agent_columns,
    agent_counts,
    agent_gains,
    agent_summary,
    pass_at,
)
from qrag_jax.models import first_encoder, pretrained
from qrag_jax.models.compute.lora import merge
from qrag_jax.policies.plackett_luce import NOTHING
from qrag_jax.retrieval.corpus import StoredCorpus, names_of
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.index_folder import CORPUS, EXACT, IndexAt, read_manifest
from qrag_jax.retrieval.own_documents import SEMANTIC
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts import pool_search, text_table, token_episodes
from qrag_jax.rollouts.experience import AgentExperience, Experience, Playing, questions_at
from qrag_jax.rollouts.pool_search import HopBatch, Rewarded, StateRows
from qrag_jax.rollouts.token_episodes import AgentRollout, Episode, Start
from qrag_jax.runtime import aot, bounded_json, config_fields, hosts
from qrag_jax.runtime.interrupt import StopSignal, wait_for
from qrag_jax.runtime.mesh import shard_batch, shardings_of
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import DEV, Run, log
from qrag_jax.systems import indexing, scoring, training
from qrag_jax.systems.config import Drawn, drawn
from qrag_jax.systems.harr import config as harr_config
from qrag_jax.systems.harr.config import HarrConfig
from qrag_jax.systems.scoring import Logs, Predictor, ScoreOptions, Way
from qrag_jax.systems.search import indexed

K = TypeVar("K")
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_ADVICE = (
    "use a model that follows the agent's prompts, raise config.llm.max_tokens or "
    "config.agent.max_broken_share, or give prompts of your own (config.agent.prompts); an agent "
    "of your own (config.agent.path) must be mended"
)
_EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it

# Sections of the config that the play of given weights does not depend on.
_OF_TRAINING = {"train", "optimizer", "runtime", "profile", "llm", "reranker", "questions"}
_SAMPLED = 2**31 - 2  # as `_EVALUATED`: of draws for pass@k
_STATELESS = "untrained, the sub-query alone"


@dataclasses.dataclass(kw_only=True)
class Harr(training.MeshSystem[HarrConfig]):
    """It plays episodes on this host's devices.

    A run is scored with three retrievers, which search greedily: the one that was trained, the
    encoder that it started from in the same states, and this encoder by the sub-query alone.
    """

    SETTINGS = HarrConfig
    INDEX: ClassVar[str] = "index"  # in the run's folder
    AT_ONCE: ClassVar[int] = 256  # questions played side by side, and written together
    OF_QUESTIONS, ASKED = ("data.", "eval.path"), ("data.path", "data.sources", "eval.path")
    models: HarrModels  # what the agent and the rewards ask

    def __post_init__(self) -> None:
        super().__post_init__()
        # Programs that send between devices must begin in the same order on all of them, also those
        # of a thread that plays ahead.
        self.device, self.counts = threading.Lock(), token_episodes.Counts()
        config, inputs, index = self.config, self.inputs, self.inputs.index
        self.data, self.provenance = inputs.data, self.models.provenance
        self.model = self.models.model
        self.shown = {"loss": ".3f", "return": ".2f"}
        loaded, encoder = inputs.model, inputs.model.encoder
        longest = min(config.state.max_tokens, encoder.max_positions)
        # How states are cut to rows of tokens.
        self.rows = StateRows(
            loaded.tokenizer,
            encoder.state_opening,
            encoder.sep_id,
            longest,
            stateful=config.state.stateful,
            instruction=config.state.instruction,
        )
        # Names of the rewards of episodes and of searches, in the order of `Rewarded`.
        names, hop = config.reward.rewards.weights, (*rag.OF_HOPS, rag.RELEVANCE)
        self._rewards = [n for n in names if n not in hop], [n for n in names if n in hop]
        sizes = config.agent.max_hops, longest, encoder.width
        self._shape = pool_search.HopShape(*sizes, *map(len, self._rewards))
        over = "a corpus that is not read" if index is None else f"{len(index.corpus)} passages"
        self.line = (
            f"{len(inputs.train)} training questions, {len(inputs.dev)} scored every "
            f"{self.train.eval_every} steps, over {over}; "
            f"{self.train.steps} steps of {config.train.batch_size} questions × "
            f"{config.rule.members} episodes by the {config.agent.name} agent on "
            f"{self.mesh.size} {Platform.of(self.mesh).kind} device(s)"
        )

    # ------------------------------------------------------------------ how it is opened

    @classmethod
    def check_mesh(cls, config: HarrConfig, mesh: Mesh, local_mesh: Mesh) -> None:
        hosts.check_play(config.runtime.mesh, local_mesh, config.agent.staleness)
        config_fields.check_split("train.batch_size × members", config.episodes, mesh.size)

    @classmethod
    def parts(cls, at: training.Opening) -> dict[str, Any]:
        config, model = at.config, NO_MODELS
        if not at.dry:  # the server starts while the data are read and the corpus is embedded
            model = at.stack.enter_context(open_models(config, at.workdir))
        if at.asked is not None:  # only training leaves questions out
            config = dataclasses.replace(config, questions=harr_config.QuestionsConfig())
        how: Any = {"is_kept": at.begun, "searches": not at.dry}
        with contextlib.nullcontext(at.stop) if at.stop else hosts.AgreedStop() as stop:
            inputs = load_inputs(config, at.workdir, at.mesh, stop, **how)
        return {"inputs": inputs, "models": model}

    # ------------------------------------------------------------------ what is trained

    def update(self, state: TrainState, episodes: HopBatch) -> tuple[TrainState, dict[str, Any]]:
        with self.device:
            updated = self._call("update", self._update, (state, episodes, *self.base))
            if self.config.agent.staleness and Platform.of(self.mesh).on_cpu:
                # It has no queue that keeps the order of programs.
                jax.block_until_ready(updated)
            return updated

    def programs(self) -> list[aot.Program]:
        state = self._parts.shapes(self.inputs.model.trained)
        nothing = [Rewarded((), None)] * self.config.episodes
        batch = pool_search.hop_batch(nothing, self._shape, self.config.policy)
        batch = jax.eval_shape(lambda arrays: arrays, batch)
        trunk, rows = self.inputs.model.trunk, self.config.episodes * self._shape.hops
        flops = self.learner.update_passes * trunk.config.flops(rows, self._shape.tokens / 2)
        arguments, dtype = (state, batch, *self.base), trunk.precision.products.name
        return [aot.Program("update", self._update, arguments, flops, dtype)]

    @cached_property
    def learner(self) -> QueryEncoder:
        """The query encoder, from which all programs are built."""
        config, loaded = self.config, self.inputs.model
        alike = np.ones(self.rows.max_tokens + 1, np.int64)  # of lengths nothing is known yet
        weights = config.reward.rewards.weights
        of_episode, of_hop = (tuple(weights[name] for name in names) for names in self._rewards)
        return QueryEncoder.of(
            self.mesh,
            loaded,
            self._parts,
            encoder=loaded.encoder,
            blocks=text_table.blocks_of(config.encoder, alike, Platform.of(self.mesh)),
            config=config.rule,
            tau=config.policy.tau,
            weights=(of_episode, of_hop),
            schedule=learning_rate_schedule(config.optimizer),
            is_fresh=not config.agent.staleness,
        )

    @cached_property
    def _parts(self) -> Parts:
        config, rule, critic = self.config, self.config.rule, None
        if isinstance(rule, PPOConfig):
            rate = rule.critic_learning_rate
            critic = make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))
        kl = rule.kl if isinstance(rule, PPOConfig) else rule.beta
        width = self.inputs.model.encoder.width
        return Parts(make_optimizer(config.optimizer), critic, kl > 0, width)

    @cached_property
    def _update(self) -> Any:
        return make_query_update(self.learner)

    # ------------------------------------------------------------------ what is played

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        # Made before a thread plays ahead: two threads would make two.
        config, _ = self.config, self._here
        if self.model is not None:
            self.model.wait(stop)
        order = partial(
            questions_at,
            questions=len(self.inputs.train),
            batch=config.train.batch_size,
            seed=config.seed,
            shard=(jax.process_index(), jax.process_count()),
        )
        stale = config.agent.staleness
        playing = Playing(
            play=self._play,
            batch=lambda episodes, number: shard_batch(
                self.mesh, pool_search.hop_batch(episodes, self._shape, config.policy)
            ),
            save=pool_search.saved,
            restore=lambda kept: pool_search.restored(kept, self.inputs.index.vectors),
            params=lambda state: _copied(state.params) if stale else self.here(state.params),
            staleness=stale,
            steps=config.train.steps,
        )
        done, pending = run.progress.batches or 0, run.progress.pending
        return AgentExperience(order, playing, self._counted, done, pending=pending)

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        golds, params = self.inputs.dev, self.here(state.params)

        def play(places: Sequence[int]) -> list[Episode]:
            part = [golds[place] for place in places]
            shard = jax.process_index(), jax.process_count()
            return self.play(params, self.starts(part, 1, _EVALUATED, *shard), stop, is_greedy=True)

        return agent_evaluation(step, golds, self.config.eval.best_by, play)

    def starts(
        self, golds: Sequence[Sample], members: int, number: int, first: int = 0, apart: int = 1
    ) -> list[Start]:
        """Episodes whose draws depend on the step, the place in the batch and the member alone.

        The questions have the places `first`, `first + apart` and so on in the batch of all hosts.
        """
        key = jax.random.fold_in(jax.random.key(self.config.seed), number)
        places = first + apart * np.arange(len(golds), dtype=np.uint32)
        keys = np.asarray(token_episodes.draw_keys(key, places, members))
        return [
            Start(Task(question.id, question.question), keys[place, member], place)
            for place, question in enumerate(golds)
            for member in range(members)
        ]

    def play(
        self, params: Any, starts: Sequence[Start], stop: StopSignal, *, is_greedy: bool = False
    ) -> list[Episode]:
        """Plays episodes by these parameters, until few of them are broken."""
        config, model, watch = self.config, self.model, self._watch(stop)
        search = pool_search.PoolSearch(
            partial(self._tower.embed, merge(params, self._here[-1])),
            self.inputs.index,
            self.rows,
            config.policy,
            is_greedy,
        )

        def one_at_a_time(asks: Sequence[pool_search.Ask]) -> Sequence[pool_search.Drawn | Failure]:
            with self.device:
                return search(asks)

        rollout = AgentRollout(
            self._agent,
            stop=watch,
            attempts=config.agent.attempts,
            counts=self.counts,
            search=one_at_a_time,
            model=model.client if model else None,
        )
        share = config.agent.max_broken_share
        patience = Patience(share, watch, log, _ADVICE, Failed, token_episodes.HOPELESS)
        return patience.play(starts, rollout.play)

    def _watch(self, stop: StopSignal) -> Checks:
        """Looks at the signal, and whether the server of the language model was given up."""
        return Watch(stop, self.model.lost if self.model else str)

    def _play(
        self, params: Any, numbers: Sequence[int], number: int, stop: StopSignal
    ) -> list[Rewarded]:
        """The groups of these questions (`experience.Playing`); without rewards they are masked."""
        members = self.config.rule.members
        golds = [self.inputs.train[n] for n in numbers]
        starts = self.starts(golds, members, number, jax.process_index() * len(golds))
        played = self.play(params, starts, stop)
        scores = self.scores([gold for gold in golds for _ in range(members)], played, stop)
        (of_episode, of_hop), rewarded = self._rewards, []
        for episode, scored in zip(played, scores, strict=True):
            if isinstance(scored, Failure):
                rewarded.append(Rewarded(episode.searches, None))
                continue
            by_hop = [
                [scored.hops[name][hop] for name in of_hop] for hop in range(len(episode.searches))
            ]
            whole = [scored.episode[name] for name in of_episode]
            rewarded.append(Rewarded(episode.searches, whole, by_hop))
        return rewarded

    def scores(
        self, golds: Sequence[Sample], episodes: Sequence[Episode], stop: StopSignal
    ) -> list[rag.Scored | Failure]:
        """The rewards of each episode, or why it has none."""
        mixture, watch = self.config.reward.rewards, self._watch(stop)
        closed = {
            n: (episode.ended, episode.searches)
            for n, episode in enumerate(episodes)
            if isinstance(episode.ended, Closed)
        }
        verdicts = dict[int, float | Failure]()
        if rag.LLM in mixture.weights:
            assert self.model is not None
            how, prompt = self.model.generation, prompts.load(JUDGE)
            answers = {
                n: rag.judged_answer(prompt, golds[n], ended.answer, how)
                for n, (ended, _) in closed.items()
            }
            outcomes = _asked(self.model.client, answers, watch)
            verdicts = {n: verdict_of(outcome, how) for n, outcome in outcomes.items()}
        relevance: dict[int, list[float | Failure]] = {n: [] for n in range(len(episodes))}
        if rag.RELEVANCE in mixture.weights:
            passages = self.inputs.index.corpus.passages
            read = dict[tuple[int, int], Any]()  # of each search the passages that the agent read
            for n, (ended, searches) in closed.items():
                for hop, drawn in zip(ended.history, searches, strict=True):
                    texts = passages(drawn.pool[drawn.actions[drawn.actions != NOTHING]])
                    read[n, len(read)] = rag.reranked_passages(hop.sub_query, texts)
            reranked = _asked(self.models.reranker, read, watch)
            for place in read:
                relevance[place[0]].append(rag.mean_score(reranked.get(place)))
        return [
            mixture.score(
                golds[n],
                episode.ended,
                [s.names for s in episode.searches],
                verdicts.get(n),
                relevance[n],
            )
            for n, episode in enumerate(episodes)
        ]

    @cached_property
    def _agent(self) -> Agent:
        config, model = self.config.agent, self.model
        if config.name == harr_config.SCRIPTED:
            every = (*self.inputs.train, *self.inputs.dev)
            return Scripted({sample.id: sample for sample in every}, config.max_hops)
        if self.models.own_agent is not None:
            return self.models.own_agent
        assert model is not None
        loaded: dict[str, Any] = load_prompts(config)
        loaded |= {"generation": model.generation, "max_hops": config.max_hops}
        if config.name != harr_config.SEARCH_R1:
            return (Planner if config.name == harr_config.PLANNER else ReAct)(**loaded)
        text = _chat_text(self.config, model.generation.enable_thinking)
        return SearchR1(**loaded, max_turns=config.max_turns, chat_text=text)

    @cached_property
    def _tower(self) -> text_table.MeshTower:
        """The query encoder's programs; `play` gives it the parameters."""
        mesh, model, rows = self.local_mesh or self.mesh, self.inputs.model, self.rows.max_tokens
        rules = model.trunk.partition_rules()
        of_params, of_base = (
            shardings_of(mesh, rules, part) for part in (model.trained, model.base)
        )
        whole = merge(of_params, of_base)
        return text_table.MeshTower(mesh, whole, model.encoder, None, number=None, row_tokens=rows)

    def _counted(self) -> dict[str, float]:
        counts, client = self.counts, self.model.client if self.model else None
        asked = metrics_of_all(client.counters()) if client else {}
        local_counts = np.array([counts.searches, counts.batches, counts.failed], np.float64)
        searches, batches, broken = hosts.of_each(local_counts).sum(axis=0).tolist()
        return asked | {"searches_per_batch": searches / max(batches, 1), "broken_episodes": broken}

    # ---------------------------------------------------------------- a run is scored

    def plays(self, raw: ConfigDict, options: ScoreOptions, stop: StopSignal) -> dict[str, Any]:
        """What plays greedily, and in `options.sampled` drawn episodes of each question besides."""
        if self.model is not None:
            self.model.wait(stop)
        free = _OF_TRAINING | {*harr_config.ALGORITHMS}
        record = {
            "config": {name: part for name, part in raw.to_dict().items() if name not in free},
            "data": self.inputs.data,
            "questions": len(self.inputs.dev),
            "sampled": options.sampled,
            "answers depend on": self.provenance,
        }
        play = partial(self.answered, stop=stop)
        how = {"rows": AGENTS, "size": self.AT_ONCE, "play": play, "record": record}
        return {"asked": self.inputs.dev, **how}

    def answered(
        self, params: Any, part: Sequence[Sample], first: int, *, stop: StopSignal, sampled: int = 0
    ) -> list[AgentRow]:
        episodes = self.play(params, self.starts(part, 1, _SAMPLED, first), stop, is_greedy=True)
        rows = [agent_row(sample, episode) for sample, episode in zip(part, episodes)]
        if not sampled:
            return rows
        drawn = self.play(params, self.starts(part, sampled, _SAMPLED, first), stop)
        for i, sample in enumerate(part):
            every = (agent_row(sample, one) for one in drawn[i * sampled : (i + 1) * sampled])
            whole = [row.em > 0 for row in every if not row.failed]
            rows[i] = dataclasses.replace(rows[i], right=sum(whole), sampled=len(whole))
        return rows

    def ways(self, predictor: Predictor) -> Iterator[Way]:
        config, options = self.config, predictor.options
        file, first = f"agent_seed{config.eval.seed}", predictor.weights(scoring.FIRST)
        alone = dataclasses.replace(config.state, stateful=False)
        of_query = dataclasses.replace(self, config=dataclasses.replace(config, state=alone))
        play = partial(of_query.answered, stop=predictor.stop)
        name = f"untrained-the-sub-query-alone/{file}"
        yield predictor.way(first, name, _STATELESS, play, way=_STATELESS)
        yield predictor.way(first, f"untrained/{file}")
        trained = predictor.weights(options.checkpoint)
        play = partial(self.answered, stop=predictor.stop, sampled=options.sampled)
        yield predictor.way(trained, f"{trained.name}/{file}", f"trained, {trained.label}", play)

    def summary(self, predictor: Predictor, logs: Logs) -> tuple[dict[str, Any], list[str]]:
        rows, sampled = {label: AGENTS.read(log) for label, log in logs}, predictor.options.sampled
        summary = scoring.compared(rows, main := logs[-1][0], agent_summary, agent_gains)
        if sampled:
            summary["pass@k"] = _passes(rows[main], sampled)
        return summary, _table(summary)


def agent_evaluation(
    step: int,
    golds: Sequence[Sample],
    best_by: str,
    play: Callable[[Sequence[int]], Sequence[Episode]],
) -> Evaluation:
    """Scores fixed questions; of several hosts, each plays its part, and all call this together.

    Args:
        golds: the questions, with their relevant passages as `grades`.
        best_by: the score that chooses the best checkpoint.
        play: places of questions → an episode for each of them, in order.
    """

    def ask(places: Sequence[int]) -> list[Any]:
        rows = map(agent_row, [golds[place] for place in places], play(places))
        return [*map(dataclasses.asdict, rows)]

    rows = [bounded_json.typed(AgentRow, fields) for fields in of_all_hosts(len(golds), ask)]
    columns, counts = agent_columns(rows), agent_counts(rows)
    if not columns["recall"]:  # no question has gold passages
        del columns["recall"]
    scores = means(columns)
    shown = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
    scores |= {name: counts[name] for name in ("broken_share", "failed_share")}
    lost = lost_text(scores, {"broken_share": "broken", "failed_share": "failed"})
    line = f"step {step}: {shown}{lost} on {len(golds)} questions"
    kept = sampler(AGENTS, rows)
    return Evaluation.of(line, scores, best_by, columns, episodes=kept)


def agent_row(gold: Sample, episode: Episode) -> AgentRow:
    """The row of an episode, whose question has this gold."""
    ended, names = episode.ended, [s.names for s in episode.searches]
    answer, broken, em, f1 = "", "", 0.0, 0.0
    if isinstance(ended, Failed):
        broken = ended.cause
    else:
        answer = ended.answer
        em, f1 = rag.em_f1(answer, gold)
    return AgentRow(
        *(gold.id, gold.question, gold.answers, answer, broken, em, f1),
        recall=ranking.episode_recall(gold.relevant, names) if gold.relevant else None,
        searches=tuple(
            {"query": hop.sub_query, "status": hop.status, "answer": hop.answer, "names": list(ids)}
            for hop, ids in zip(ended.history, names)
        ),
    )


def _passes(rows: Sequence[AgentRow], sampled: int) -> dict[str, float]:
    """Of 1, 2, 4, … draws; a question counts where so many are whole."""
    known = [row for row in rows if row.right is not None]
    passes = {
        str(k): [pass_at(k, row.right or 0, row.sampled) for row in known if row.sampled >= k]
        for k in (1 << place for place in range(sampled.bit_length()))
    }
    return {k: float(np.mean(values)) for k, values in passes.items() if values}


def _table(summary: Mapping[str, Any]) -> list[str]:
    columns, losses = ("em", "f1", "recall", "hops"), ("broken", "failed")
    counts = {loss: f"{{{loss}}} of {{questions}}" for loss in losses}
    text = score_table(summary["scores"].items(), columns, counts, summary["gains"].items())
    if "pass@k" in summary:
        passes = ", ".join(f"{k}: {value:.3f}" for k, value in summary["pass@k"].items())
        text.append(f"pass@k of drawn passages: {passes}")
    return text


# ---------------------------------------------------------------- what a run reads


@dataclasses.dataclass(frozen=True)
class Inputs:
    model: pretrained.LoadedEncoder
    index: Any  # a `VectorIndex`; None: nothing will be searched
    train: Sequence[Sample]  # the questions that are trained on
    dev: Sequence[Sample]
    drawn: Drawn  # of all evaluation questions, those of `dev`
    # Content keys: of all training questions, by source, of the corpus, and of the choice of
    # questions if there is one
    data: dict[str, str]


def load_inputs(
    config: HarrConfig,
    workdir: Path,
    mesh: Mesh,
    stop: StopSignal,
    *,
    is_kept: bool,
    searches: bool = True,
) -> Inputs:
    """Reads the questions, prepares the encoder, and builds or opens the index of the corpus.

    The documents are embedded by the encoder that the run starts from, and not again.

    Args:
        mesh: embeds the corpus and searches it; of several hosts, that of this one's devices.
        is_kept: the run has begun; the encoder in its folder is used as it is.
        searches: whether anything will be searched; else the corpus is not read.
    """
    if not is_kept:
        first_encoder.check_origin(config.encoder)
    agent = config.agent
    train_samples, dev_samples, report = load_questions(
        config.data,
        config.dev_data,
        taken_apart=agent.name == harr_config.SCRIPTED,
        max_hops=agent.max_hops,
    )
    for line in report:
        log(line)
    kept, choice = _kept(config.questions.kept, train_samples)
    every = (*train_samples, *dev_samples)
    texts = (text for sample in every for text in (sample.question, *sample.chunks))
    platform = Platform.of(mesh)
    encoder = first_encoder.prepare_encoder(
        config.encoder, workdir, texts, config.seed, is_kept=is_kept, platform=platform
    )
    index = None
    if searches:
        folder, most = str(workdir / first_encoder.FOLDER), config.data.max_chunk_tokens
        settings = dataclasses.replace(config.encoder, path=folder)
        tower = indexing.PassageEncoder.of_folder(folder, settings, mesh, most)
        tower = dataclasses.replace(tower, title_separator=config.data.passage_separator)
        arguments = config.search, partial(_passages, every), workdir / Harr.INDEX, tower
        at = indexed(*arguments, begun=is_kept, stop=stop)
        if (engine := config.search.engine) == SEMANTIC:
            opened = StoredCorpus(at / CORPUS), mesh, tower.digest(), config.search.dtype
            index = ExactIndex.open(at / EXACT, *opened)
        else:
            read_manifest(at / EXACT, encoder=tower.digest())
            index = IndexAt(at, engine).open()
    golds = _golds(config, every, index)
    train, dev = golds[: len(train_samples)], golds[len(train_samples) :]
    shown = drawn([gold.id for gold in dev], config.eval)
    by_source: dict[str, list[Sample]] = {}
    for sample in train_samples:
        by_source.setdefault(sample.source, []).append(sample)
    keys = {name: fingerprint(samples) for name, samples in by_source.items()}
    keys[DEV] = fingerprint(dev_samples)
    if index is not None:
        keys["corpus"] = index.corpus.digest
    return Inputs(
        model=encoder,
        index=index,
        train=[train[number] for number in kept],
        dev=[dev[place] for place in shown.places],
        drawn=shown,
        data=keys | choice,
    )


def _kept(path: str, train: Sequence[Sample]) -> tuple[Sequence[int], dict[str, str]]:
    """The training questions that a file of `qrag filter_data` keeps, and the choice's key."""
    if not path:
        return range(len(train)), {}
    field = "config.questions.kept"
    chosen = {(row.id, row.question): row.kept for row in REWARDS.read(Path(path).expanduser())}
    names = [(sample.id, sample.question) for sample in train]
    lacking = [name for name in names if name not in chosen]
    numbers = [n for n, name in enumerate(names) if chosen.get(name)]
    if lacking or not numbers:
        why = f"lacks the training question {lacking[0][0]}" if lacking else "keeps no question"
        raise InputError(
            f"{field} is {path}, which {why}; give qrag filter_data again, or a lower --least_std."
        )
    log(f"{len(numbers)} of {len(train)} training questions are kept by {path}")
    kept = json.dumps([names[n] for n in numbers])
    return numbers, {field: hashlib.sha256(kept.encode()).hexdigest()[:16]}


def _passages(samples: Sequence[Sample]) -> Iterator[Passage]:
    """The different passages of all questions."""
    texts = dict.fromkeys(text for sample in samples for text in sample.chunks)
    return (Passage(str(number), text) for number, text in enumerate(texts))


def _golds(config: HarrConfig, samples: Sequence[Sample], index: Any) -> list[Sample]:
    golds, without = [], 0
    texts = {sample.chunks[place] for sample in samples for place in sample.support}
    names = {text: text for text in texts} if index is None else names_of(index.corpus, texts)
    for sample in samples:
        gold = [names.get(sample.chunks[place]) for place in sample.support]
        # A gold passage that the corpus lacks can never be found.
        grades = () if None in gold else tuple((name, 1) for name in gold if name)
        without += None in gold
        # Its passages are in the index.
        golds.append(dataclasses.replace(sample, chunks=(), support=(), titles=(), grades=grades))
        config.reward.rewards.check(golds[-1])
    if without:
        log(f"{without} of {len(samples)} questions have a gold passage that is not in the corpus")
    return golds


# ---------------------------------------------------------------- models

# The prompts of the agents that have some, by their arguments' names.
PROMPTS: Mapping[str, dict[str, str]] = {
    harr_config.REACT: {"planner": "rag_planner", "final": "rag_final", "reader": "rag_qa"},
    harr_config.PLANNER: {"planner": "rag_steps", "final": "rag_synthesis", "reader": "rag_qa"},
    harr_config.SEARCH_R1: {"prompt": "rag_search_r1"},
}


def load_prompts(config: harr_config.AgentConfig) -> dict[str, prompts.Prompt]:
    """The agent's prompts; those in the folder `config.prompts` replace ours of the same name."""
    wanted, folder = PROMPTS.get(config.name, {}), config.prompts
    paths = {name: Path(folder).expanduser() / f"{file}.txt" for name, file in wanted.items()}
    replacements = {name: str(path) for name, path in paths.items() if folder and path.exists()}
    if folder and not replacements:
        files = ", ".join(f"{file}.txt" for file in wanted.values()) or "no prompts"
        raise InputError(
            f"config.agent.prompts: {folder} has none of the prompts of the {config.name} agent "
            f"({files}); name the files so, or leave the field empty."
        )
    return {name: prompts.load(replacements.get(name, file)) for name, file in wanted.items()}


class HarrModels(NamedTuple):
    provenance: dict[str, Any]  # what answers depend on, as JSON
    reranker: Any  # a `Client`, for the reward `relevance`; None: nothing asks it
    model: Any  # a `Model`, of the agent and of the reward `llm`; None: nothing asks it
    own_agent: OwnAgent | None  # the user's, if the config names one


NO_MODELS = HarrModels({}, None, None, None)  # nothing will be played


def _asked(model: Any, requests: Mapping[K, Request | None], watch: Checks) -> dict[K, Any]:
    """The outcomes of the requests; those that are None are not asked."""
    asked = {place: request for place, request in requests.items() if request is not None}
    future = model.submit([*asked.values()])
    try:
        outcomes = wait_for(future, watch.check)
    except BaseException:
        future.cancel()
        raise
    return dict(zip(asked, outcomes, strict=True))


def _chat_text(config: HarrConfig, thinks: bool | None) -> Callable[[prompts.Messages], str]:
    """How the first prompt becomes the text that the model continues."""
    llm = config.llm
    assert llm is not None
    tokenizer = llm.tokenizer or (llm.server.model if llm.server is not None else "")
    if not tokenizer:
        raise InputError("search_r1 needs a chat template; give config.llm.tokenizer.")
    return generation.chat_template(tokenizer, thinks).opened


@contextlib.contextmanager
def open_models(config: HarrConfig, workdir: Path) -> Iterator[HarrModels]:
    """Opens the models that a run asks, until the end of the block; our server starts meanwhile."""
    weights, used = config.reward.rewards.weights, load_prompts(config.agent)
    agent, model, reranker = None, None, None
    if rag.LLM in weights:
        used["judge"] = prompts.load(JUDGE)
    provenance = {f"the prompt {name}": prompt.fingerprint for name, prompt in used.items()}
    if config.agent.name == harr_config.OWN:
        agent = OwnAgent.load(config.agent.path, config.agent.max_hops)
        provenance[PATH] = f"{agent.code.spec} {agent.code.digest}"
        log(f"the agent is {agent.code.spec}, which runs in this process, without a sandbox")
    with contextlib.ExitStack() as stack:
        if config.llm is not None:
            from qrag_jax.llm.server.server import open_model  # some agents ask no model

            host = jax.process_index()
            model = stack.enter_context(open_model(config.llm, workdir, config.seed, log, host))
            provenance |= model.provenance
        if rag.RELEVANCE in weights:
            from qrag_jax.llm.client import Client

            reranker = Client(config.reranker.client, log)
            stack.callback(reranker.close)
            provenance["the reranker"] = config.reranker.model
        yield HarrModels(provenance, reranker, model, agent)


SYSTEM = Harr
