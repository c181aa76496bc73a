"""Reads and checks the questions, the model and the tools of an RLVR run, before it plays."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.dataset_parts import parse_parts, read_part
from qrag_jax.data.sample import Split
from qrag_jax.data.scripted import BridgeQuestion, bridge_questions
from qrag_jax.environments.tools.demonstrations import Demonstration, draw_choices
from qrag_jax.environments.tools.documents import bridge_task, tasks_of
from qrag_jax.environments.tools.episode import ToolTask
from qrag_jax.environments.tools.play import ToolAgent
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import Drawn, drawn
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.server.model_digest import model_digest
from qrag_jax.llm.text import prompts
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.opening import BM25
from qrag_jax.retrieval.own_documents import (
    EmbeddingScorer,
    EndpointScorer,
    KeptVectors,
    OwnRetriever,
    Scorer,
)
from qrag_jax.rollouts.libraries import CorpusLibrary, OwnLibrary, on_corpus
from qrag_jax.rollouts.scripted_tokens import scripted_talk
from qrag_jax.rollouts.token_episodes import Library, Speech
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.whole_files import default_cache
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.plain_search import PlainEncoder, QuestionTower, open_corpus, prefixed
from qrag_jax.systems.rlvr_config import SFT, RlvrConfig, ToolsConfig
from qrag_jax.systems.token_config import BRIDGE
from qrag_jax.systems.token_system import model_of

_WAIT = 60.0  # seconds that a search waits for a rerank service that is down
_FIELDS = ("config.tools.corpus", "config.tools.retriever", "config.tools.encoder")


def open_library(config: RlvrConfig, mesh: Mesh) -> Library:
    """What the tools read."""
    tools = config.tools
    if tools.corpus:
        if tools.rerank_url:
            raise InputError(
                "config.tools.corpus names a corpus, which config.tools.rerank_url cannot search; "
                "use config.tools.encoder or the retriever bm25, and leave the URL empty."
            )
        clean = config.tasks.clean
        return open_corpus(tools.corpus, tools.retriever, _encoder(tools), _FIELDS, clean=clean)
    return OwnLibrary(OwnRetriever(tools.retriever, scorer_of(tools, mesh)))


def scorer_of(tools: ToolsConfig, mesh: Mesh) -> Scorer | None:
    """The scorer that the config names; None if it names none."""
    if tools.encoder and tools.rerank_url:
        raise InputError(
            "config.tools.encoder and config.tools.rerank_url both name what scores documents; "
            "leave one of them empty."
        )
    if tools.rerank_url:
        prefix = "config.tools.rerank_"
        config = ClientConfig(tools.rerank_url, tools.rerank_model, wait_limit=_WAIT, prefix=prefix)
        return EndpointScorer(Client(config))
    if tools.encoder:
        encoder = PassageEncoder.of_folder(tools.encoder, _encoder(tools).config, mesh)
        tower = encoder.tower()

        def passages(texts: Sequence[str]) -> np.ndarray:
            ids = encoder.tokenizer.encode(texts)
            return tower([encoder.row(own).tolist() for own in ids])

        return EmbeddingScorer(QuestionTower(encoder), KeptVectors(passages))
    return None


def told_documents(tools: ToolsConfig) -> str:
    """What the tools read, in words."""
    return f"the corpus in {tools.corpus}" if tools.corpus else "each question's documents"


def _encoder(tools: ToolsConfig) -> PlainEncoder:
    return prefixed(tools.encoder, tools.question_prefix, tools.passage_prefix)


_READ_FOR_TOKENIZER = 600  # demonstrations on which a tiny model's tokenizer is trained


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads.

    Attributes:
        model: what is trained.
        agent: the environment.
        library: what its tools read.
        speech: between text and ids.
        train, dev: the questions.
        drawn: of all evaluation questions, those of `dev`.
        demonstrated: the training questions that have demonstrations; () if none are imitated.
        data: content keys.
    """

    model: FirstLanguageModel
    agent: ToolAgent
    library: Library
    speech: Speech
    train: Sequence[ToolTask]
    dev: Sequence[ToolTask]
    drawn: Drawn
    demonstrated: Sequence[BridgeQuestion]
    data: dict[str, str]


def load_inputs(config: RlvrConfig, workdir: Path, mesh: Mesh, *, trains: bool = True) -> Inputs:
    """Reads the questions, prepares the model, and cuts its chat template.

    Args:
        trains: else there are no training questions.
    """
    tools = config.tools
    agent = ToolAgent(
        prompts.load(tools.prompt),
        form=tools.form,
        tools=tools.tools,
        max_turns=tools.max_turns,
        top_n=tools.top_n,
        most=tools.most,
    )
    library = open_library(config, mesh)
    made = _Bridge(config, "train") if config.questions.train == BRIDGE else None
    train: Sequence[ToolTask] = ()
    if trains:
        train = made.tasks if made else _read(config, config.questions.train)
    dev: Sequence[ToolTask]
    if config.questions.dev == BRIDGE:
        dev = _Bridge(config, "dev").tasks
    else:
        dev = _read(config, config.questions.dev)
    train = _without(train, dev) if trains else train
    corpus = library.corpus if isinstance(library, CorpusLibrary) else None
    if corpus is not None:
        train, dev = _on_corpus(train, corpus), _on_corpus(dev, corpus)

    texts = partial(_demonstrated_texts, config, agent, made.questions) if made else None
    model, speech = model_of(config, workdir, mesh, texts, config.tools.turn_tokens)
    _check_prompts(config, agent, speech, (*train, *dev))
    shown = drawn([task.id for task in dev], config.eval)
    return Inputs(
        model=model,
        agent=agent,
        library=library,
        speech=speech,
        train=train,
        dev=[dev[number] for number in shown.places],
        drawn=shown,
        demonstrated=made.questions if trains and made and SFT in config.stages else (),
        data={
            "questions": fingerprint(train),
            DEV: fingerprint(dev),
            "model": model_digest(model.folder, default_cache(), log),
            "prompt": agent.prompt.fingerprint,
        }
        | ({} if corpus is None else {"corpus": corpus.digest}),
    )


@dataclasses.dataclass(frozen=True)
class _Bridge:
    """The questions that are made here."""

    config: RlvrConfig
    split: Split

    @functools.cached_property
    def questions(self) -> list[BridgeQuestion]:
        given = self.config.questions
        count = given.bridge_train if self.split == "train" else given.bridge_dev
        return bridge_questions(given.bridge_seed, self.split, range(count))

    @property
    def tasks(self) -> list[ToolTask]:
        return [bridge_task(question) for question in self.questions]


def _read(config: RlvrConfig, text: str) -> list[ToolTask]:
    samples: list[Any] = []
    for part in parse_parts(text):
        found, report = read_part(part)
        samples += found
        log(f"{part.path}: {report}")
    return tasks_of(samples, config.tasks)


def _without(train: Sequence[ToolTask], dev: Sequence[ToolTask]) -> list[ToolTask]:
    """The training questions that are not evaluated on."""
    asked = {task.question for task in dev}
    kept = [task for task in train if task.question not in asked]
    if not kept:
        raise InputError(
            "config.questions.train and config.questions.dev name the same questions, so none is "
            "left to train on; name other parts."
        )
    return kept


def _on_corpus(tasks: Sequence[ToolTask], corpus: StoredCorpus) -> list[ToolTask]:
    found = on_corpus(tasks, corpus)
    if without := sum(not task.gold_ids for task in found):
        log(
            f"{without} of {len(found)} questions have a gold document that is not in the corpus; "
            "their recall counts as 0, and citations as right"
        )
    return found


def _demonstrated_texts(
    config: RlvrConfig, agent: ToolAgent, questions: Sequence[BridgeQuestion]
) -> Iterator[str]:
    """The texts of whole episodes, prompts and tool calls included, on questions' own documents."""
    library = OwnLibrary(OwnRetriever(BM25))
    for number, question in enumerate(questions[:_READ_FOR_TOKENIZER]):
        choices = draw_choices(config.demonstrations, config.seed, number)
        script = Demonstration(question, choices, config.tools.form)
        for messages, said in scripted_talk(agent, bridge_task(question), script, library).turns:
            yield from (text for _, text in messages)
            yield said


def _check_prompts(
    config: RlvrConfig, agent: ToolAgent, speech: Speech, tasks: Sequence[ToolTask]
) -> None:
    longest = max(tasks, key=lambda task: len(task.question))
    tokens = len(speech.scaffold.opening(agent.opening(longest.question)))
    if tokens >= config.sampling.room:
        raise InputError(
            f"the prompt of question {longest.id!r} has {tokens} tokens, and config.sampling.room "
            f"is {config.sampling.room}; raise it, or give a shorter config.tools.prompt."
        )


def fingerprint(tasks: Sequence[ToolTask]) -> str:
    """A digest of the questions, their gold answers and their documents."""
    digest = hashlib.sha256()
    for task in tasks:
        # By name: a field that documents get later must not make earlier runs those of other data.
        documents = tuple((d.id, d.title, d.text, d.is_supporting) for d in task.documents)
        digest.update(f"{task.id}\0{task.question}\0{task.answers}\0{documents}".encode())
    return digest.hexdigest()[:16]
