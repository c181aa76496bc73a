"""The passages that a query writer has found in the end, as rows of a retrieval log.

So whatever reads retrieval logs, such as the chunk filters and the model that answers, reads the
logs of query writers, too. A log has the ids of passages alone; their texts are in the corpus.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from qrag_jax.environments.queries import BY_PASSAGE, KEYS, normalised_title
from qrag_jax.environments.tasks import document_text
from qrag_jax.errors import InputError
from qrag_jax.metrics.facts import fact_em, fact_f1
from qrag_jax.metrics.row_log import read_record, record_path
from qrag_jax.metrics.rows import HOPS, Row, Searched
from qrag_jax.retrieval import corpus as stored
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.opening import CORPUS
from qrag_jax.retrieval.protocol import NONE, Passage


def corpus_of(folder: Path) -> StoredCorpus:
    """The corpus of an index, of what a run has pooled, or the folder's own."""
    own = (folder / stored.NAME).exists()
    return StoredCorpus(folder if own else folder / CORPUS)


def passages_of(
    corpus: StoredCorpus, names: Collection[str]
) -> tuple[dict[str, int], dict[str, Passage]]:
    """The numbers of passages in the corpus, and the passages, by their ids."""
    listed = sorted(names)
    numbers = corpus.numbers(listed)
    if lacking := [name for name, number in zip(listed, numbers) if number == NONE]:
        raise InputError(
            f"the corpus in {corpus.folder} lacks {len(lacking)} passages of the log, for example "
            f"{lacking[0]!r}; give the one that was searched."
        )
    passages = corpus.passages(numbers)
    return dict(zip(listed, map(int, numbers))), dict(zip(listed, passages, strict=True))


def pool_rows(log: Path, corpus: StoredCorpus) -> list[Row]:
    """The rows of a query writer's log, each with the pool after its last hop.

    A passage's number is its index, and its text is what the query writer has read of it. There are
    no Q-values and no return. Gold are pages, as in LeReT: a page counts once, by its passage that
    was found first, so that `em` is the log's `all_gold`.
    """
    rows, search = HOPS.read(log), read_record(log).get("search", {})
    by = search.get("gold_by")
    if by not in KEYS:
        raise InputError(
            f"{record_path(log)}, which says what gold pages are known by, is missing or has no "
            "search.gold_by; bring it back."
        )
    gold = _gold(rows, corpus, by)
    names = {name for row in rows for name in (*row.hops[-1].pool, *gold[row.id])}
    numbers, passages = passages_of(corpus, names)
    clean = bool(search.get("clean"))
    texts = {name: document_text(p.title, p.text, clean) for name, p in passages.items()}
    return [_row(row, gold[row.id], numbers, texts) for row in rows]


def _gold(rows: Sequence[Searched], corpus: StoredCorpus, by: str) -> dict[str, tuple[str, ...]]:
    """A passage of each gold page of each question: that found first, or the corpus' first."""
    if by == BY_PASSAGE:
        return {row.id: row.pages for row in rows}
    names: dict[str, list[str]] = {page: [] for row in rows for page in row.pages}
    for passage in corpus:
        key = normalised_title(passage.title)
        if key in names:
            names[key].append(passage.name)
    if lacking := [page for page, own in names.items() if not own]:
        raise InputError(
            f"the corpus in {corpus.folder} lacks {len(lacking)} gold pages of the log, for "
            f"example {lacking[0]!r}; give the one that was searched."
        )

    def first_of(page: str, pool: Sequence[str]) -> str:
        own = set(names[page])
        return next((name for name in pool if name in own), names[page][0])

    return {row.id: tuple(first_of(page, row.hops[-1].pool) for page in row.pages) for row in rows}


def _row(
    row: Searched,
    gold: Sequence[str],
    numbers: Mapping[str, int],
    texts: Mapping[str, str],
) -> Row:
    last = row.hops[-1]
    facts, taken = ([numbers[name] for name in names] for names in (gold, last.pool))
    answer, *aliases = row.answers or ("",)
    return Row(
        id=row.id,
        question=row.question,
        answer=answer,
        sf_idx=facts,
        pred_idx=taken,
        q_values=[],
        sf_texts=[texts[name] for name in gold],
        pred_texts=[texts[name] for name in last.pool],
        ret=None,
        text_len=sum(len(texts[name]) for name in last.pool),
        f1=fact_f1(facts, taken),
        em=fact_em(facts, taken),
        aliases=aliases,
        source=row.source,
    )
