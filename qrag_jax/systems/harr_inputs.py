"""Reads and checks the data, the encoder and the index of a HARR run, before it plays."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from qrag_jax.data.loading import Questions, load_questions
from qrag_jax.data.sample import Sample, fingerprint
from qrag_jax.data.sources import answer_rule
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import Drawn, drawn
from qrag_jax.feedback.rag import Gold
from qrag_jax.metrics.rows import REWARDS
from qrag_jax.models.first_encoder import FOLDER, check_origin, prepare_encoder
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.judged_queries import names_of
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import DEV, log
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.harr_config import SCRIPTED, HarrConfig
from qrag_jax.systems.indexing import index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder

PASSAGES, INDEX = "passages.jsonl", "index"  # in the run's folder


@dataclasses.dataclass(frozen=True)
class Asked:
    """One question, and what is right for it."""

    question: Sample
    gold: Gold


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a run reads."""

    encoder: LoadedEncoder
    searched: ExactIndex | None  # None: nothing will be searched
    train: Sequence[Asked]  # those that are trained on
    dev: Sequence[Asked]
    drawn: Drawn  # of all evaluation questions, those of `dev`
    # Content keys: of all training questions, by source, of the corpus, and of the choice of
    # questions if there is one
    data: dict[str, str]

    @property
    def index(self) -> ExactIndex:
        """The index that is searched."""
        assert self.searched is not None
        return self.searched

    @property
    def passages(self) -> str:
        """Words for the screen: what is searched."""
        if self.searched is None:
            return "a corpus that is not read"
        return f"{len(self.index.corpus)} passages"


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
    kept: Sequence[int] = range(len(questions.train))
    choice: dict[str, str] = {}
    if config.questions.kept:
        kept, choice = _kept(config.questions.kept, questions.train)
    every = (*questions.train, *questions.dev)
    texts = (text for each in every for text in (each.question, *each.chunks))
    encoder = prepare_encoder(
        config.encoder,
        workdir,
        texts,
        config.seed,
        is_kept=is_kept,
        platform=Platform.of(mesh),
    )
    index = _index(config, workdir, mesh, questions, stop) if searches else None
    golds = _golds(config, questions, index)
    train, dev = golds[: len(questions.train)], golds[len(questions.train) :]
    asked = list(map(Asked, questions.train, train))
    shown = drawn([gold.id for gold in dev], config.eval)
    by_source: dict[str, list[Sample]] = {}
    for each in questions.train:
        by_source.setdefault(each.source, []).append(each)
    keys = {name: fingerprint(own) for name, own in by_source.items()}
    keys[DEV] = fingerprint(questions.dev)
    if index is not None:
        keys["corpus"] = index.corpus.digest
    return Inputs(
        encoder=encoder,
        searched=index,
        train=[asked[number] for number in kept],
        dev=[Asked(questions.dev[i], dev[i]) for i in shown.places],
        drawn=shown,
        data=keys | choice,
    )


def _kept(path: str, train: Sequence[Sample]) -> tuple[list[int], dict[str, str]]:
    """The training questions that a file of `qrag filter_data` keeps, and the choice's key."""
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
    folder = workdir / INDEX
    source = Path(config.corpus.path).expanduser() if config.corpus.path else None
    if source is None:
        source = workdir / PASSAGES
        hosts.first_does(lambda: _write_passages(questions, source))
    encoder = PassageEncoder.of_folder(
        str(workdir / FOLDER),
        dataclasses.replace(config.encoder, path=str(workdir / FOLDER)),
        mesh,
        config.data.max_chunk_tokens,
    )
    encoder = dataclasses.replace(encoder, title_separator=config.data.passage_separator)
    indexed = index_corpus(source, folder, encoder, stop=stop)
    return ExactIndex.open(indexed.folder, indexed.corpus, mesh, encoder=encoder.digest())


def _write_passages(questions: Questions, path: Path) -> None:
    if not path.exists():
        lines = (
            json.dumps({"id": str(number), "text": text}, ensure_ascii=False)
            for number, text in enumerate(questions.passages())
        )
        write_whole(path, "\n".join(lines) + "\n")


def _golds(config: HarrConfig, questions: Questions, index: ExactIndex | None) -> list[Gold]:
    every = (*questions.train, *questions.dev)
    texts = {each.chunks[place] for each in every for place in each.support}
    names = {text: text for text in texts} if index is None else names_of(index.corpus, texts)
    golds, without = [], 0
    mixture = config.reward.rewards
    for each in every:
        gold_texts = [each.chunks[place] for place in each.support]
        found = [names[text] for text in gold_texts if text in names]
        # A gold passage that the corpus lacks can never be found.
        relevant = frozenset(found) if len(found) == len(gold_texts) else frozenset()
        without += bool(gold_texts) and not relevant
        rule = answer_rule(each.source)
        gold = Gold(each.id, each.question, each.answers, relevant, rule=rule)
        mixture.check(gold)
        golds.append(gold)
    if without:
        log(f"{without} of {len(every)} questions have a gold passage that is not in the corpus")
    return golds
