"""Reads and checks the data, the encoder and the index of a HARR run, before it plays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.rag_questions import RagQuestion, RagQuestions, load_questions
from qrag_jax.data.sample import fingerprint
from qrag_jax.feedback.rag import Gold
from qrag_jax.metrics.answers import rule_of
from qrag_jax.models.first_encoder import FOLDER, prepare_encoder
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.gold_names import names_of
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.harr_config import SCRIPTED, HarrConfig
from qrag_jax.systems.indexing import index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder

PASSAGES, INDEX = "passages.jsonl", "index"  # in the run's folder


@dataclasses.dataclass(frozen=True)
class Asked:
    """One question, and what is right for it."""

    question: RagQuestion
    gold: Gold


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a run reads.

    Attributes:
        data: content key of the training questions, by source.
    """

    encoder: LoadedEncoder
    index: ExactIndex
    train: Sequence[Asked]
    dev: Sequence[Asked]
    data: dict[str, str]


def load_inputs(
    config: HarrConfig, workdir: Path, mesh: Mesh, stop: StopSignal, *, is_kept: bool
) -> Inputs:
    """Reads the questions, prepares the encoder, and builds or opens the index of the corpus.

    The documents are embedded by the encoder that the run starts from, and not again.

    Args:
        workdir: the run's folder.
        is_kept: the run has begun; the encoder in its folder is used as it is.

    Raises:
        InputError: the data, the encoder or the corpus cannot be used, or do not fit the config.
        Stopped: a signal came while the corpus was embedded; the same command goes on.
    """
    scripted = config.agent.name == SCRIPTED
    questions = load_questions(
        config.data, config.dev_data, taken_apart=scripted, max_hops=config.agent.max_hops
    )
    for line in questions.report:
        log(line)
    every = (*questions.train, *questions.dev)
    texts = (text for each in every for text in (each.sample.question, *each.sample.chunks))
    encoder = prepare_encoder(
        config.encoder,
        workdir,
        texts,
        config.seed,
        is_kept=is_kept,
        platform=Platform.of(mesh),
    )
    index = _index(config, workdir, mesh, questions, stop)
    golds = _golds(config, questions, index)
    train, dev = golds[: len(questions.train)], golds[len(questions.train) :]
    order = np.random.default_rng(config.eval.seed).permutation(len(dev))
    shown = sorted(order[: config.eval.samples or len(dev)].tolist())
    by_source: dict[str, list[RagQuestion]] = {}
    for each in questions.train:
        by_source.setdefault(each.sample.source, []).append(each)
    keys = {n: fingerprint([e.sample for e in own]) for n, own in by_source.items()}
    return Inputs(
        encoder=encoder,
        index=index,
        train=list(map(Asked, questions.train, train)),
        dev=[Asked(questions.dev[i], dev[i]) for i in shown],
        data={**keys, "corpus": index.corpus.digest},
    )


def _index(
    config: HarrConfig, workdir: Path, mesh: Mesh, questions: RagQuestions, stop: StopSignal
) -> ExactIndex:
    folder = workdir / INDEX
    source = Path(config.corpus.path).expanduser() if config.corpus.path else None
    if source is None:
        source = workdir / PASSAGES
        if not source.exists():
            lines = (
                json.dumps({"id": str(number), "text": text}, ensure_ascii=False)
                for number, text in enumerate(questions.passages())
            )
            write_whole(source, "\n".join(lines) + "\n")
    encoder = PassageEncoder.of_folder(
        str(workdir / FOLDER),
        dataclasses.replace(config.encoder, path=str(workdir / FOLDER)),
        mesh,
        config.data.max_chunk_tokens,
    )
    indexed = index_corpus(source, folder, encoder, stop=stop)
    return ExactIndex.open(indexed.folder, indexed.corpus, mesh, encoder=encoder.digest())


def _golds(config: HarrConfig, questions: RagQuestions, index: ExactIndex) -> list[Gold]:
    every = (*questions.train, *questions.dev)
    names = names_of(index.corpus, (text for each in every for text in each.gold))
    golds, without = [], 0
    mixture = config.reward.rewards
    for each in every:
        found = [names[text] for text in each.gold if text in names]
        # A gold passage that the corpus lacks can never be found.
        relevant = frozenset(found) if len(found) == len(each.gold) else frozenset()
        without += not relevant
        sample = each.sample
        gold = Gold(sample.id, sample.question, sample.answers, relevant, rule=rule_of(sample.id))
        mixture.check(gold)
        golds.append(gold)
    if without:
        log(f"{without} of {len(every)} questions have a gold passage that is not in the corpus")
    return golds
