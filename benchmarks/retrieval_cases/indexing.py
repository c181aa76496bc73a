"""Measures how fast a corpus is indexed: beside the bare encoder, and as the corpus grows.

Everything is counted in seconds of the processors, all threads together, since other programs may
share the machine. Programs are compiled before: lengths decide on them, so each corpus has its own.
What an index costs once (opening, tracing, fetching programs) is taken off.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.report import Case
from qrag_jax.data.files.corpora import read_corpus
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.text_table import laid_out
from qrag_jax.runtime.compilation import enable_persistent_cache
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.minilm import find_minilm
from qrag_jax.runtime.process import PeakMemory
from qrag_jax.systems.indexing import CORPUS, Indexed, IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.passage_rows import PassageRows

LEAST_RATIO = 0.9
MOST_EXPONENT = 1.05
PART = 256
RATIO_PASSAGES = 1024
SIZES = (1000, 2000, 4000, 8000)
REPEATS = 3  # the least of them counts: processors that others share are slower now and then


def indexing_cases(quick: bool, corpus: Path | None = None) -> Iterator[Case]:
    """Both cases.

    Args:
        quick: a small encoder and few passages, without targets.
        corpus: JSON lines, gzip'd; None: 2WikiMultihopQA's open corpus in the folder QRAG_DATA.
    """
    data = Path(os.environ.get("QRAG_DATA", "../shared/data"))
    corpus = corpus or data / "2wikimultihopqa" / "open_corpus.jsonl.gz"
    minilm = None if quick else find_minilm(download=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        enable_persistent_cache()
        texts = (read.document.text for read in itertools.islice(read_corpus(corpus), 2000))
        make_scratch_folder(folder / "small", texts, ScratchConfig(), 0)
        small = PassageEncoder.of_folder(str(folder / "small"))
        tower, named = small, "2 layers of width 128"
        if minilm is not None:
            tower, named = PassageEncoder.of_folder(str(minilm)), "all-MiniLM-L6-v2"
        yield ratio_case(tower, named, corpus, RATIO_PASSAGES, folder)
        sizes = SIZES[:3] if quick else SIZES
        yield growth_case(small, "2 layers of width 128", corpus, sizes, folder)


def ratio_case(
    tower: PassageEncoder, named: str, corpus: Path, passages: int, folder: Path
) -> Case:
    """Tokens/s of an index, beside those of the encoder alone on the same groups of rows."""
    first = part_of(corpus, PART, folder)
    whole = part_of(corpus, PART + passages, folder)
    once, _ = _timed(tower, first, folder)
    seconds, indexed = _timed(tower, whole, folder)
    bare, tokens = _bare(tower, indexed, passages)
    ours, theirs = tokens / (seconds - once), tokens / bare
    return Case(
        f"indexing beside the bare encoder, {passages} passages, {named}",
        ours,
        "tokens/s of processor time",
        peer=theirs,
        ratio=ours / theirs,
        target=f">= {LEAST_RATIO:g}x",
        holds=ours / theirs >= LEAST_RATIO,
        details={
            "peer": "the packed encoder alone, on rows that are made already",
            "rows": f"{tokens} tokens, at most {tower.row_tokens} each",
            "once for an index (s)": once,
            "index (s)": seconds - once,
            "encoder alone (s)": bare,
        },
    )


def growth_case(
    tower: PassageEncoder, named: str, corpus: Path, sizes: Sequence[int], folder: Path
) -> Case:
    """The exponent e of seconds ~ once + tokens^e.

    Sizes double, so that what one index takes longer than the one before grows as tokens^e: what it
    costs once drops out. Tokens and not passages: those at a corpus' end may be longer.
    """
    seconds, tokens, details = [], [], {}
    for size in sizes:
        path, memory = part_of(corpus, size, folder), PeakMemory()
        spent, indexed = _timed(tower, path, folder)
        seconds.append(spent)
        tokens.append(indexed.tokens)
        details[f"{size} passages (tokens)"] = float(tokens[-1])
        details[f"{size} passages (processor s)"] = seconds[-1]
        details[f"{size} passages (peak MiB)"] = memory.mebibytes()
    more_tokens, more_seconds = np.diff(tokens), np.diff(seconds)
    exponent = None  # so little work that other programs' outweighs it
    if more_seconds.min() > 0:
        exponent = float(np.polyfit(np.log(more_tokens), np.log(more_seconds), 1)[0])
    return Case(
        f"indexing, growth of the time with the corpus, {named}",
        exponent,
        "exponent",
        target=f"<= {MOST_EXPONENT:g}",
        holds=None if exponent is None else exponent <= MOST_EXPONENT,
        details=details,
    )


def part_of(corpus: Path, passages: int, folder: Path) -> Path:
    """A file with the corpus' first lines.

    Raises:
        ValueError: the corpus has fewer.
    """
    path = folder / f"{passages}.jsonl"
    with gzip.open(corpus) as file:
        lines = list(itertools.islice(file, passages))
    if len(lines) < passages:
        raise ValueError(f"{corpus} has {len(lines)} passages, not {passages}")
    path.write_bytes(b"".join(lines))
    return path


def _timed(tower: PassageEncoder, corpus: Path, folder: Path) -> tuple[float, Indexed]:
    """Least processor seconds of an index, and the last index; programs are compiled before."""
    settings, out = IndexSettings(part=PART), Path(tempfile.mkdtemp(prefix="index-", dir=folder))
    stop = StopSignal()
    stop.requested = True  # after the first part
    with contextlib.suppress(Stopped):
        index_corpus(None, _stored(corpus, out / "compiled"), tower, settings, stop)
    spent = []
    for repeat in range(REPEATS):
        started = time.process_time()
        made = index_corpus(corpus, out / f"index{repeat}", tower, settings)
        spent.append(time.process_time() - started)
    return min(spent), made


def _stored(corpus: Path, out: Path) -> Path:
    """A folder with the stored corpus alone."""
    passages = (Passage(*read.document) for read in read_corpus(corpus))
    write_corpus(out / CORPUS, passages)
    return out


def _bare(tower: PassageEncoder, indexed: Indexed, passages: int) -> tuple[float, int]:
    """Processor seconds of the encoder for the passages after the first part, and their tokens."""
    encoder, stored = tower.encoder, indexed.corpus
    rows = PassageRows(stored.folder, tower.tokenizer, encoder.chunk_opening, tower.row_tokens)
    made = [rows.of(range(start, start + PART)) for start in range(PART, PART + passages, PART)]
    embed = tower.embed(np.concatenate([each.lengths for each in made]))
    groups = [
        laid_out(each.each(), (PART, tower.row_tokens), tower.mesh.size, encoder.pad_id)
        for each in made
    ]
    on_devices = [jax.device_put((group.tokens, group.lengths)) for group in groups]
    np.asarray(embed(tower.params, *on_devices[0]))  # compiles
    spent = []
    for _ in range(REPEATS):
        started = time.process_time()
        for given in on_devices:
            np.asarray(embed(tower.params, *given))
        spent.append(time.process_time() - started)
    return min(spent), sum(int(each.lengths.sum()) for each in made)
