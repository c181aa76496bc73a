"""Adds hard negatives to training questions: passages of an index that a search takes for good.

What was found is kept in the run's folder, so a run that goes on trains on the same passages, and
needs no search.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from qrag_jax.data.loading import LoadedSamples, NegativesConfig
from qrag_jax.data.sample import LazySamples, Sample, fingerprint
from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import has_answer, normalise, worded
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.index_folder import BM25, CORPUS, version
from qrag_jax.retrieval.multi_step import Hit, by_turns
from qrag_jax.retrieval.protocol import NONE, Passage
from qrag_jax.runtime import hosts
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR, passage_text
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.whole_files import replacing
from qrag_jax.systems.retriever import Retriever, SingleStepRetriever

FOUND = "negatives.npz"  # in the run's folder
_AT_ONCE = 256  # questions searched side by side
_SPARE = 8  # passages asked for beyond those wanted, since some are the question's own


def with_negatives(
    config: NegativesConfig, loaded: LoadedSamples, run: Run, separator: str = TITLE_SEPARATOR
) -> LoadedSamples:
    """The samples with `config.count` more passages each, behind their own.

    Left out are a question's own passages, and those that may be good though nobody has said so:
    passages with the title or the beginning of a supporting one, and passages that hold the answer
    (as in DPR, arXiv 2004.04906). If fewer are left, fewer are added.
    """
    for name, samples in loaded.by_source.items():
        if isinstance(samples, LazySamples):
            raise InputError(
                f"config.data.negatives.index is not for {name}, which makes its documents."
            )
    folder = version(Path(config.index).expanduser())
    corpus, samples = StoredCorpus(folder / CORPUS), list(loaded.all)
    found = _kept(run, config, corpus, samples)

    def longer(sample: Sample, numbers: np.ndarray) -> Sample:
        passages = corpus.passages(numbers[numbers != NONE])
        more = [passage_text(each.title, each.text, separator) for each in passages]
        return dataclasses.replace(sample, chunks=(*sample.chunks, *more), titles=())

    all_longer = map(longer, samples, found)
    by_source: dict[str, Sequence[Sample]] = {
        name: [*itertools.islice(all_longer, len(own))] for name, own in loaded.by_source.items()
    }
    added = int((found != NONE).sum()) / max(len(samples), 1)
    line = f"negatives: {added:.1f} passages of {folder} for each question"
    return LoadedSamples(by_source, [*loaded.report, line])


def _kept(
    run: Run, config: NegativesConfig, corpus: StoredCorpus, samples: Sequence[Sample]
) -> np.ndarray:
    """The numbers of all samples' negatives, int64 `[samples, count]`, found once in a run."""
    path, settings = run.workdir / FOUND, [config.search, str(config.count), str(config.skip)]
    about = [corpus.digest, fingerprint(samples), *settings]

    def read() -> np.ndarray | None:
        with np.load(path) as file:
            return file["numbers"] if file["about"].tolist() == about else None

    def find() -> None:
        if not path.is_file() or read() is None:
            numbers = np.array(list(_found(config, corpus, samples)), np.int64)
            with replacing(path) as file:
                np.savez(file, numbers=numbers, about=np.array(about))

    if not run.has_begun:
        hosts.first_does(find)
    if (numbers := read()) is None:
        raise InputError(
            f"{run.workdir} was trained with passages of another corpus, or for other questions or "
            "settings of config.data.negatives; give those, or another --workdir."
        )
    return numbers


def _found(
    config: NegativesConfig, corpus: StoredCorpus, samples: Sequence[Sample]
) -> Iterator[np.ndarray]:
    search = _opened(config)
    with tqdm(desc="searching negatives", total=len(samples), unit=" questions") as bar:
        for first in range(0, len(samples), _AT_ONCE):
            part = samples[first : first + _AT_ONCE]
            own = max(len(sample.chunks) for sample in part)
            asked = min(config.count + config.skip + own + _SPARE, len(corpus))
            lists = search([sample.question for sample in part], asked)
            for sample, hits in zip(part, lists, strict=True):
                names = [hit.id for hit in hits if not may_be_good(sample, hit)]
                names = names[config.skip : config.skip + config.count]
                row = np.full(config.count, NONE, np.int64)
                row[: len(names)] = corpus.numbers(names)
                yield row
            bar.update(len(part))


def may_be_good(sample: Sample, hit: Hit) -> bool:
    """Whether a passage is one of the sample's own, or may hold what a supporting one does."""
    text = normalise(Passage(hit.id, hit.text, hit.title).whole)
    title = normalise(hit.title)
    for place, chunk in enumerate(sample.chunks):
        own = normalise(chunk)
        if own == text:
            return True
        if place in sample.support and (
            own.startswith(text) or text.startswith(own) or (title and own.startswith(f"{title} "))
        ):
            return True
    return has_answer(text, worded(sample.answers))


def _opened(config: NegativesConfig) -> Callable[[Sequence[str], int], list[list[Hit]]]:
    if config.search and jax.process_count() > 1:
        raise InputError(
            "config.data.negatives.search is given, but only words are searched on several hosts; "
            f"start the run on one host first, which keeps what it found in {FOUND}."
        )
    retriever = Retriever.load(config.search or BM25)
    retriever.open(config.index)
    if isinstance(retriever, SingleStepRetriever):
        return retriever.engine.search
    # All steps are wanted, and one path: every step may be misled.
    greedy = dataclasses.replace(
        retriever.rules.search, beam=1, stop_threshold=None, stop_action=False
    )
    rules = dataclasses.replace(retriever.rules, search=greedy)

    def search(questions: Sequence[str], k: int) -> list[list[Hit]]:
        several = retriever.engine.with_rules(dataclasses.replace(rules, per_step=k))
        return [by_turns(hits) for hits in several.search(questions)]

    return search
