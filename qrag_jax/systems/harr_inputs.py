"""What a HARR run reads and asks: data, encoder and index, the models of its agent and rewards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
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
from qrag_jax.environments.rag import PATH, OwnAgent, Planner, ReAct, Reader, SearchR1
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import Drawn, drawn
from qrag_jax.feedback.llm import Checks, Unscored, Watch, metrics_of_all, verdict_of
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
from qrag_jax.llm.outcomes import Outcome, Request
from qrag_jax.llm.server.opening import OpenModel, PendingModel, Place, open_model
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
from qrag_jax.retrieval.protocol import Corpus, Passage
from qrag_jax.rollouts import pool_search
from qrag_jax.rollouts.agents import Asks, Episode
from qrag_jax.rollouts.pool_search import Rewarded
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.harr_config import (
    OWN,
    PLANNER,
    REACT,
    SCRIPTED,
    SEARCH_R1,
    WITHOUT_MODEL,
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
        workdir: the run's folder.
        mesh: embeds the corpus and searches it; of several hosts, that of this one's devices.
        is_kept: the run has begun; the encoder in its folder is used as it is.
        searches: whether anything will be searched; else the corpus is not read.
    """
    if not is_kept:
        check_origin(config.encoder)
    scripted = config.agent.name == SCRIPTED
    questions = load_questions(
        config.data, config.dev_data, taken_apart=scripted, max_hops=config.agent.max_hops
    )
    for line in questions.report:
        log(line)
    kept, choice = _kept(config.questions.kept, questions.train)
    every = (*questions.train, *questions.dev)
    texts = (text for sample in every for text in (sample.question, *sample.chunks))
    encoder = prepare_encoder(
        config.encoder,
        workdir,
        texts,
        config.seed,
        is_kept=is_kept,
        platform=Platform.of(mesh),
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
    source = Path(config.corpus.path).expanduser() if config.corpus.path else workdir / PASSAGES
    if not config.corpus.path:
        hosts.first_does(lambda: _write_passages(questions, source))
    encoder = PassageEncoder.of_folder(
        str(workdir / FOLDER),
        dataclasses.replace(config.encoder, path=str(workdir / FOLDER)),
        mesh,
        config.data.max_chunk_tokens,
    )
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
    golds = []
    texts = {sample.chunks[place] for sample in samples for place in sample.support}
    names = {text: text for text in texts} if index is None else names_of(index.corpus, texts)
    without = 0
    for sample in samples:
        gold = [names.get(sample.chunks[place]) for place in sample.support]
        # A gold passage that the corpus lacks can never be found.
        relevant = frozenset() if None in gold else frozenset(filter(None, gold))
        without += None in gold
        rule = answer_rule(sample.source)
        right = Gold(sample.id, sample.question, sample.answers, relevant, rule=rule)
        config.reward.rewards.check(right)
        golds.append(right)
    if without:
        log(f"{without} of {len(samples)} questions have a gold passage that is not in the corpus")
    return golds


_LOOK_EVERY = 0.1  # seconds between looks for a signal to stop


def reward_names(mixture: Mixture) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the rewards of episodes and of searches, in the order of `Rewarded`."""
    of_hop = tuple(name for name in mixture.weights if name in (*OF_HOPS, RELEVANCE))
    return tuple(name for name in mixture.weights if name not in of_hop), of_hop


@dataclasses.dataclass(frozen=True)
class AgentRewards:
    """Gives episodes their rewards."""

    mixture: Mixture  # which ones
    corpus: Corpus  # the passages that were searched
    # For the reward `llm`: the model that says whether answers are right, and how it answers
    judge: tuple[Asks, Generation] | None = None
    reranker: Asks | None = None  # for the reward `relevance`

    def scores(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], watch: Checks
    ) -> list[Scored | Unscored]:
        """The rewards of each episode, without weights, or why it has none."""
        verdicts, relevance = (
            self._verdicts(golds, episodes, watch),
            self._relevance(episodes, watch),
        )
        return [
            self.mixture.score(gold, each.ended, [s.names for s in each.searches], verdict, of_hops)
            for gold, each, verdict, of_hops in zip(
                golds, episodes, verdicts, relevance, strict=True
            )
        ]

    def rewarded(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], watch: Checks
    ) -> list[Rewarded]:
        """What is learned from each episode; one without rewards is masked."""
        of_episode, of_hop = reward_names(self.mixture)
        found = []
        for each, scored in zip(episodes, self.scores(golds, episodes, watch), strict=True):
            if isinstance(scored, Unscored):
                found.append(Rewarded(each.searches, None))
                continue
            by_hop = [[scored.hops[name][hop] for name in of_hop] for hop in range(scored.searches)]
            whole = [scored.episode[name] for name in of_episode]
            found.append(Rewarded(each.searches, whole, by_hop))
        return found

    def _verdicts(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], watch: Checks
    ) -> list[float | Unscored | None]:
        """Of the judge on each answer; None where none is needed."""
        if self.judge is None or LLM not in self.mixture.weights:
            return [None] * len(episodes)
        model, generation = self.judge
        prompt = prompts.load(JUDGE)
        requests: list[Request | None] = [
            judged_answer(prompt, gold, each.ended.answer, generation)
            if isinstance(each.ended, Closed)
            else None
            for gold, each in zip(golds, episodes, strict=True)
        ]
        return [
            None if outcome is None else verdict_of(outcome, generation)
            for outcome in _asked(model, requests, watch)
        ]

    def _relevance(
        self, episodes: Sequence[Episode], watch: Checks
    ) -> list[tuple[float | Unscored, ...]]:
        """Of the passages of each search of the finished episodes."""
        if self.reranker is None or RELEVANCE not in self.mixture.weights:
            return [()] * len(episodes)
        searches = [
            [*zip(each.ended.history, each.searches, strict=True)]
            if isinstance(each.ended, Closed)
            else []
            for each in episodes
        ]
        requests: list[Request | None] = [
            reranked_passages(hop.sub_query, self._seen(drawn))
            for own in searches
            for hop, drawn in own
        ]
        outcomes: Iterator[Any] = iter(_asked(self.reranker, requests, watch))
        return [tuple(mean_score(next(outcomes)) for _ in own) for own in searches]

    def _seen(self, drawn: pool_search.Drawn) -> list[Passage]:
        """The passages that the agent read."""
        taken = drawn.pool[drawn.actions[drawn.actions != NOTHING]]
        return self.corpus.passages(taken)


def _asked(model: Asks, requests: Sequence[Request | None], watch: Checks) -> list[Outcome | None]:
    """The outcomes of the requests, None for None."""
    sent = [each for each in requests if each is not None]
    future = model.submit(sent)
    try:
        while not concurrent.futures.wait([future], _LOOK_EVERY).done:
            watch.check()
    except BaseException:
        future.cancel()
        raise
    outcomes = iter(future.result())
    return [None if each is None else next(outcomes) for each in requests]


# The prompts of each agent, by its arguments' names.
PROMPTS: Mapping[str, dict[str, str]] = {
    SCRIPTED: {},
    OWN: {},
    REACT: {"planner": "rag_planner", "final": "rag_final", "reader": "rag_qa"},
    PLANNER: {"steps": "rag_steps", "synthesis": "rag_synthesis", "reader": "rag_qa"},
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


def llm_agent(config: HarrConfig, generation: Generation) -> Agent:
    """The agent with a language model that the config names."""
    agent = config.agent
    loaded: dict[str, Any] = load_prompts(agent)
    if "reader" in loaded:
        loaded["reader"] = Reader(loaded["reader"], generation)
    if agent.name == SEARCH_R1:
        extra = {} if agent.chat_template else HAS_SPECIAL_TOKENS
        return SearchR1(
            **loaded,
            chat_text=_chat_text(config, generation),
            generation=generation,
            limits=agent.limits,
            extra=extra,
        )
    if agent.name == PLANNER:
        return Planner(**loaded, generation=generation, limits=agent.limits)
    return ReAct(**loaded, generation=generation, limits=agent.limits)


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


@dataclasses.dataclass
class HarrModels:
    """What a run asks."""

    config: HarrConfig
    provenance: dict[str, Any]  # what answers depend on, as JSON
    reranker: Asks | None  # for the reward `relevance`
    _pending: PendingModel | None
    own_agent: OwnAgent | None = None  # the user's, if the config names one
    _open: OpenModel | None = None

    def wait(self, stop: StopSignal) -> None:
        """Waits until the language model answers."""
        if self._pending is not None and self._open is None:
            self._open = self._pending.ready(stop)

    @property
    def generation(self) -> Generation | None:
        """How the language model's answers are sampled and read; None: there is no model."""
        return None if self._pending is None else self._pending.generation

    @property
    def agents_own(self) -> Asks | None:
        """The model that the agent asks."""
        if self._open is None or self.config.agent.name in WITHOUT_MODEL:
            return None
        return self._open.client

    @property
    def judge(self) -> tuple[Asks, Generation] | None:
        """Who gives the reward `llm`."""
        if self._open is None or self.generation is None:
            return None
        return self._open.client, self.generation

    @property
    def kept(self) -> str:
        """See `OpenModel.kept`."""
        return self._open.kept if self._open is not None else ""

    def watch(self, stop: StopSignal) -> Checks:
        """Looks at the signal, and whether the server was given up."""
        return Watch(stop, self._open.lost) if self._open is not None else stop

    def counts(self) -> dict[str, float]:
        """Of the language model's clients, as metrics; all hosts call this together."""
        return metrics_of_all(self._open.client.counters()) if self._open is not None else {}


@contextlib.contextmanager
def open_models(config: HarrConfig, workdir: Path) -> Iterator[HarrModels]:
    """Opens the models that a run asks; they end with the block.

    A server of our own starts while the caller goes on.
    """
    weights, own = config.reward.rewards.weights, None
    used = load_prompts(config.agent)
    if LLM in weights:
        used["judge"] = prompts.load(JUDGE)
    provenance = {f"the prompt {name}": each.fingerprint for name, each in used.items()}
    if config.agent.name == OWN:
        own = OwnAgent.load(config.agent.path, config.agent.limits)
        provenance[PATH] = f"{own.code.spec} {own.code.digest}"
        log(f"the agent is {own.code.spec}, which runs in this process, without a sandbox")
    with contextlib.ExitStack() as stack:
        pending, reranker = None, None
        if config.llm is not None:
            place = Place(workdir, config.data.cache_folder, jax.process_index())
            pending = stack.enter_context(open_model(config.llm, place, config.seed, log))
            provenance |= pending.provenance
        if RELEVANCE in weights:
            from qrag_jax.llm.client import Client

            reranker = Client(config.reranker.client, log)
            stack.callback(reranker.close)
            provenance["the reranker"] = config.reranker.model
        yield HarrModels(config, provenance, reranker, pending, own)
