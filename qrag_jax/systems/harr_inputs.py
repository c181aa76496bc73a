"""What a HARR run reads and asks: data, encoder and index, the models of its agent and rewards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from qrag_jax.data.loading import Questions, load_questions
from qrag_jax.data.sample import Decomposition, Sample, fingerprint
from qrag_jax.data.sources import answer_rule
from qrag_jax.environments.episode import Agent, Closed
from qrag_jax.environments.rag import PATH, OwnAgent, Planner, ReAct, SearchR1
from qrag_jax.errors import InputError
from qrag_jax.feedback.llm import metrics_of_all, verdict_of
from qrag_jax.feedback.questions import JUDGE
from qrag_jax.feedback.rag import (
    LLM,
    OF_HOPS,
    RELEVANCE,
    Gold,
    Mixture,
    Scored,
    judged_answer,
    mean_score,
    reranked_passages,
)
from qrag_jax.feedback.rewards import Checks, Unscored, Watch
from qrag_jax.llm.outcomes import Outcome, Request
from qrag_jax.llm.server.opening import Model, Place, open_model
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import (
    HAS_SPECIAL_TOKENS,
    Generation,
    chat_tokenizer,
    in_template,
    templated,
)
from qrag_jax.llm.text.prompts import Messages, Prompt
from qrag_jax.metrics.rows import REWARDS
from qrag_jax.models.first_encoder import FOLDER, check_origin, prepare_encoder
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.policies.plackett_luce import NOTHING
from qrag_jax.retrieval.corpus import NAME, StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.index_folder import CORPUS, EXACT
from qrag_jax.retrieval.judged_queries import names_of
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.rollouts.pool_search import Rewarded
from qrag_jax.rollouts.token_episodes import Asks, Episode
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import LOOK_EVERY, StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.config import Drawn, drawn
from qrag_jax.systems.harr_config import (
    OWN,
    PLANNER,
    REACT,
    SCRIPTED,
    SEARCH_R1,
    AgentConfig,
    HarrConfig,
)
from qrag_jax.systems.indexing import index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder

PASSAGES, INDEX = "passages.jsonl", "index"  # in the run's folder


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a run reads."""

    encoder: LoadedEncoder
    searched: ExactIndex | None  # None: nothing will be searched
    train: Sequence[Gold]  # the questions that are trained on
    dev: Sequence[Gold]
    drawn: Drawn  # of all evaluation questions, those of `dev`
    # Content keys: of all training questions, by source, of the corpus, and of the choice of
    # questions if there is one
    data: dict[str, str]
    apart: dict[str, Decomposition]  # by the ids of the questions of which one is known

    @property
    def index(self) -> ExactIndex:
        """The index that is searched."""
        assert self.searched is not None
        return self.searched


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
        check_origin(config.encoder)
    agent = config.agent
    questions = load_questions(
        config.data, config.dev_data, taken_apart=agent.name == SCRIPTED, max_hops=agent.max_hops
    )
    for line in questions.report:
        log(line)
    kept, choice = _kept(config.questions.kept, questions.train)
    every = (*questions.train, *questions.dev)
    texts = (text for sample in every for text in (sample.question, *sample.chunks))
    platform = Platform.of(mesh)
    encoder = prepare_encoder(
        config.encoder, workdir, texts, config.seed, is_kept=is_kept, platform=platform
    )
    index = _index(config, workdir, mesh, questions, stop) if searches else None
    golds = _golds(config, every, index)
    train, dev = golds[: len(questions.train)], golds[len(questions.train) :]
    shown = drawn([gold.id for gold in dev], config.eval)
    by_source: dict[str, list[Sample]] = {}
    for sample in questions.train:
        by_source.setdefault(sample.source, []).append(sample)
    keys = {name: fingerprint(samples) for name, samples in by_source.items()}
    keys[DEV] = fingerprint(questions.dev)
    if index is not None:
        keys["corpus"] = index.corpus.digest
    return Inputs(
        encoder=encoder,
        searched=index,
        train=[train[number] for number in kept],
        dev=[dev[place] for place in shown.places],
        drawn=shown,
        data=keys | choice,
        apart={sample.id: sample.decomposition for sample in every if sample.decomposition},
    )


def _kept(path: str, train: Sequence[Sample]) -> tuple[Sequence[int], dict[str, str]]:
    """The training questions that a file of `qrag filter_data` keeps, and the choice's key."""
    if not path:
        return range(len(train)), {}
    field = "config.questions.kept"
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"{field} is {path}, which is no file; give one of qrag filter_data.")
    chosen = {(row.id, row.question): row.kept for row in REWARDS.read(file)}
    for sample in train:
        if (sample.id, sample.question) not in chosen:
            raise InputError(
                f"{field} is {path}, which lacks the training question {sample.id}: it is of other "
                "data or not finished; give the command qrag filter_data again, or the file of "
                "these data."
            )
    numbers = [n for n, each in enumerate(train) if chosen[each.id, each.question]]
    if not numbers:
        raise InputError(
            f"{field} is {path}, which keeps none of the {len(train)} training questions; give the "
            "command qrag filter_data a lower --least_std, or leave the field out."
        )
    log(f"{len(numbers)} of {len(train)} training questions are kept by {path}")
    names = json.dumps([(train[n].id, train[n].question) for n in numbers])
    return numbers, {field: hashlib.sha256(names.encode()).hexdigest()[:16]}


def _index(
    config: HarrConfig, workdir: Path, mesh: Mesh, questions: Questions, stop: StopSignal
) -> ExactIndex:
    source, folder = Path(config.corpus.path or workdir / PASSAGES).expanduser(), workdir / FOLDER
    if not config.corpus.path:
        hosts.first_does(lambda: _write_passages(questions, source))
    settings = dataclasses.replace(config.encoder, path=str(folder))
    encoder = PassageEncoder.of_folder(str(folder), settings, mesh, config.data.max_chunk_tokens)
    encoder = dataclasses.replace(encoder, title_separator=config.data.passage_separator)
    if (source / CORPUS / NAME).is_file():  # an index that is there already
        stored = StoredCorpus(source / CORPUS)
        return ExactIndex.open(source / EXACT, stored, mesh, encoder=encoder.digest())
    indexed = index_corpus(source, workdir / INDEX, encoder, stop=stop)
    return ExactIndex.open(indexed.folder, indexed.corpus, mesh, encoder=encoder.digest())


def _write_passages(questions: Questions, path: Path) -> None:
    if not path.exists():
        lines = (
            json.dumps({"id": str(number), "text": text}, ensure_ascii=False)
            for number, text in enumerate(questions.passages())
        )
        write_whole(path, "\n".join(lines) + "\n")


def _golds(config: HarrConfig, samples: Sequence[Sample], index: ExactIndex | None) -> list[Gold]:
    """What is right for each question."""
    golds, without = [], 0
    texts = {sample.chunks[place] for sample in samples for place in sample.support}
    names = {text: text for text in texts} if index is None else names_of(index.corpus, texts)
    for sample in samples:
        gold = [names.get(sample.chunks[place]) for place in sample.support]
        # A gold passage that the corpus lacks can never be found.
        relevant = frozenset() if None in gold else frozenset(filter(None, gold))
        without += None in gold
        rule = answer_rule(sample.source)
        golds.append(Gold(sample.id, sample.question, sample.answers, relevant, rule=rule))
        config.reward.rewards.check(golds[-1])
    if without:
        log(f"{without} of {len(samples)} questions have a gold passage that is not in the corpus")
    return golds


def reward_names(mixture: Mixture) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the rewards of episodes and of searches, in the order of `Rewarded`."""
    of_hop = tuple(name for name in mixture.weights if name in (*OF_HOPS, RELEVANCE))
    return tuple(name for name in mixture.weights if name not in of_hop), of_hop


# ---------------------------------------------------------------- models


# The prompts of each agent, by its arguments' names.
PROMPTS: Mapping[str, dict[str, str]] = {
    SCRIPTED: {},
    OWN: {},
    REACT: {"planner": "rag_planner", "final": "rag_final", "reader": "rag_qa"},
    PLANNER: {"planner": "rag_steps", "final": "rag_synthesis", "reader": "rag_qa"},
    SEARCH_R1: {"prompt": "rag_search_r1"},
}


def load_prompts(config: AgentConfig) -> dict[str, Prompt]:
    """The agent's prompts; those in the folder `config.prompts` replace ours of the same name."""
    wanted, folder = PROMPTS[config.name], config.prompts
    paths = {name: Path(folder).expanduser() / f"{file}.txt" for name, file in wanted.items()}
    own = {name: str(path) for name, path in paths.items() if folder and path.exists()}
    if folder and not own:
        files = ", ".join(f"{file}.txt" for file in wanted.values()) or "no prompts"
        raise InputError(
            f"config.agent.prompts: {folder} has none of the prompts of the {config.name} agent "
            f"({files}); name the files so, or leave the field empty."
        )
    return {name: prompts.load(own.get(name, file)) for name, file in wanted.items()}


@dataclasses.dataclass
class HarrModels:
    """The models that a run asks, for its agent and for its rewards."""

    config: HarrConfig
    provenance: dict[str, Any]  # what answers depend on, as JSON
    reranker: Asks | None  # for the reward `relevance`
    model: Model | None  # of the agent, and of the reward `llm`
    own_agent: OwnAgent | None = None  # the user's, if the config names one

    def wait(self, stop: StopSignal) -> None:
        """Waits until the language model answers."""
        if self.model is not None:
            self.model.wait(stop)

    @property
    def client(self) -> Asks | None:
        """Asks the language model; None: there is none."""
        return self.model.client if self.model is not None else None

    @property
    def kept(self) -> str:
        """See `Model.kept`."""
        return self.model.kept if self.model is not None else ""

    def watch(self, stop: StopSignal) -> Checks:
        """Looks at the signal, and whether the server was given up."""
        return Watch(stop, self.model.lost) if self.model is not None else stop

    def counts(self) -> dict[str, float]:
        """Of the language model's clients, as metrics; all hosts call this together."""
        client = self.model.client if self.model is not None else None
        return metrics_of_all(client.counters()) if client is not None else {}

    @functools.cached_property
    def agent(self) -> Agent:
        """The user's agent, or the one with a language model that the config names."""
        if self.own_agent is not None:
            return self.own_agent
        assert self.model is not None
        agent, generation = self.config.agent, self.model.generation
        loaded: dict[str, Any] = load_prompts(agent)
        loaded |= {"generation": generation, "limits": agent.limits}
        if agent.name != SEARCH_R1:
            return (Planner if agent.name == PLANNER else ReAct)(**loaded)
        extra = {} if agent.chat_template else HAS_SPECIAL_TOKENS
        return SearchR1(**loaded, chat_text=_chat_text(self.config, generation), extra=extra)

    def scores(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], corpus: Corpus, watch: Checks
    ) -> list[Scored | Unscored]:
        """The rewards of each episode that searched this corpus, or why it has none."""
        mixture = self.config.reward.rewards
        closed = [each.ended if isinstance(each.ended, Closed) else None for each in episodes]
        verdicts: list[float | Unscored | None] = [None] * len(episodes)
        if LLM in mixture.weights:
            assert self.model is not None
            generation, prompt = self.model.generation, prompts.load(JUDGE)
            answers = [
                None if ended is None else judged_answer(prompt, gold, ended.answer, generation)
                for gold, ended in zip(golds, closed, strict=True)
            ]
            verdicts = [
                None if outcome is None else verdict_of(outcome, generation)
                for outcome in _asked(self.client, answers, watch)
            ]
        relevance: list[tuple[float | Unscored, ...]] = [()] * len(episodes)
        if RELEVANCE in mixture.weights:
            searches = [
                [*zip(ended.history, each.searches, strict=True)] if ended is not None else []
                for ended, each in zip(closed, episodes, strict=True)
            ]
            read = [  # the passages that the agent read
                reranked_passages(
                    hop.sub_query,
                    corpus.passages(drawn.pool[drawn.actions[drawn.actions != NOTHING]]),
                )
                for hops in searches
                for hop, drawn in hops
            ]
            outcomes = iter(_asked(self.reranker, read, watch))
            relevance = [tuple(mean_score(next(outcomes)) for _ in hops) for hops in searches]
        return [
            mixture.score(gold, each.ended, [s.names for s in each.searches], verdict, of_hops)
            for gold, each, verdict, of_hops in zip(
                golds, episodes, verdicts, relevance, strict=True
            )
        ]

    def rewarded(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], corpus: Corpus, watch: Checks
    ) -> list[Rewarded]:
        """What is learned from each episode; one without rewards is masked."""
        of_episode, of_hop = reward_names(self.config.reward.rewards)
        found = []
        for each, scored in zip(episodes, self.scores(golds, episodes, corpus, watch), strict=True):
            if isinstance(scored, Unscored):
                found.append(Rewarded(each.searches, None))
                continue
            by_hop = [[scored.hops[name][hop] for name in of_hop] for hop in range(scored.searches)]
            whole = [scored.episode[name] for name in of_episode]
            found.append(Rewarded(each.searches, whole, by_hop))
        return found


def _asked(
    model: Asks | None, requests: Sequence[Request | None], watch: Checks
) -> list[Outcome | None]:
    """The outcomes of the requests, None for None."""
    assert model is not None
    future = model.submit([each for each in requests if each is not None])
    try:
        while not concurrent.futures.wait([future], LOOK_EVERY).done:
            watch.check()
    except BaseException:
        future.cancel()
        raise
    outcomes = iter(future.result())
    return [None if each is None else next(outcomes) for each in requests]


def _chat_text(config: HarrConfig, generation: Generation) -> Callable[[Messages], str]:
    """How the first prompt becomes the text that the model continues."""
    llm = config.llm
    assert llm is not None
    if config.agent.chat_template:
        return in_template(config.agent.chat_template)
    tokenizer = llm.tokenizer or (llm.server.model if llm.server is not None else "")
    if not tokenizer:
        raise InputError(
            "the search_r1 agent sends a text, for which it needs the model's chat template: give "
            "its folder in config.llm.tokenizer, or the template in config.agent.chat_template."
        )
    return templated(chat_tokenizer(tokenizer), generation.enable_thinking)


@contextlib.contextmanager
def open_models(config: HarrConfig, workdir: Path) -> Iterator[HarrModels]:
    """Opens the models that a run asks; they end with the block.

    A server of our own starts while the caller goes on.
    """
    weights, used = config.reward.rewards.weights, load_prompts(config.agent)
    own, model, reranker = None, None, None
    if LLM in weights:
        used["judge"] = prompts.load(JUDGE)
    provenance = {f"the prompt {name}": prompt.fingerprint for name, prompt in used.items()}
    if config.agent.name == OWN:
        own = OwnAgent.load(config.agent.path, config.agent.limits)
        provenance[PATH] = f"{own.code.spec} {own.code.digest}"
        log(f"the agent is {own.code.spec}, which runs in this process, without a sandbox")
    with contextlib.ExitStack() as stack:
        if config.llm is not None:
            place = Place(workdir, config.data.cache_folder, jax.process_index())
            model = stack.enter_context(open_model(config.llm, place, config.seed, log))
            provenance |= model.provenance
        if RELEVANCE in weights:
            from qrag_jax.llm.client import Client

            reranker = Client(config.reranker.client, log)
            stack.callback(reranker.close)
            provenance["the reranker"] = config.reranker.model
        yield HarrModels(config, provenance, reranker, model, own)
