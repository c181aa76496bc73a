"""A trained retriever as a model of mteb: it indexes each task's corpus and searches in steps."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.integrations import imported
from qrag_jax.retrieval.multi_step import Hit, by_turns
from qrag_jax.runtime.whole_files import replacing
from qrag_jax.systems.retriever import Retriever, SingleStepRetriever

with imported("mteb"):
    from mteb.models import ModelMeta
    from mteb.models.model_meta import ScoringFunction

if TYPE_CHECKING:
    from qrag_jax.systems.indexing import IndexSettings

_AT_ONCE = 256  # queries, whose passages are held in memory


class QRagSearch:
    """mteb's `SearchProtocol`; `docs/export.md` says how passages are ranked.

    Scores are Q-values, lowered where they would not fall from one passage to the next, for mteb
    sorts by them. A copy of the retriever (of the backend jax) searches: its own index stays open.
    A finished index in `folder` is used again.
    """

    def __init__(
        self, retriever: Retriever, folder: str | Path, settings: IndexSettings | None = None
    ) -> None:
        if isinstance(retriever, SingleStepRetriever):
            raise InputError("QRagSearch(retriever) takes trained ones; mteb has others itself.")
        self.retriever, self.folder = copy.copy(retriever), Path(folder).expanduser()
        self.settings = settings

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """The name is that of the folder; by the digest of the model mteb keeps results."""
        chunk, folder = self.retriever.config.chunk, Path(self.retriever.deployment.folder)
        about: dict[str, Any] = {"name": f"qrag_jax/{folder.resolve().name}"}
        about |= {"revision": self.retriever.digest()}
        about |= {"framework": ["JAX"], "similarity_fn_name": ScoringFunction.DOT_PRODUCT}
        about |= {"embed_dim": chunk.width, "max_tokens": chunk.max_tokens}
        return ModelMeta.create_empty(about)

    def index(self, corpus: Any, *, task_metadata: Any, **unused: Any) -> None:
        """Indexes a task's corpus, or opens its index.

        It is a `datasets.Dataset` with the columns id, text and, if there are titles, title.
        """
        from qrag_jax.systems.indexing import IndexSettings

        _check_text(corpus, "corpus", task_metadata.name)
        digest = hashlib.sha256()
        for line in _lines(corpus):
            digest.update(line)
        file = self.folder / f"{task_metadata.name}-{digest.hexdigest()[:16]}.jsonl"
        if not file.exists():
            with replacing(file) as out:
                out.writelines(_lines(corpus))
        settings = self.settings or IndexSettings(skip_empty=True)
        self.retriever.index(file, file.with_suffix(""), settings)

    def search(
        self, queries: Any, *, task_metadata: Any, top_k: int, top_ranked: Any = None, **unused: Any
    ) -> dict[str, dict[str, float]]:
        """The passages of each query: query id → passage id → score.

        Queries are a `datasets.Dataset` with the columns id, text and, if there are any,
        instruction, which goes behind the text.
        """
        if top_ranked is not None:
            raise InputError(
                f"{task_metadata.name} ranks given documents; choose one of retrieval."
            )
        _check_text(queries, "queries", task_metadata.name)
        texts = list(queries["text"])
        if "instruction" in queries.column_names:
            pairs = zip(texts, queries["instruction"], strict=True)
            texts = [f"{text} {more}" if more else text for text, more in pairs]
        rows: list[dict[str, float]] = []
        for first in range(0, len(texts), _AT_ONCE):
            part = texts[first : first + _AT_ONCE]
            hits, more = self.retriever.search(part), self.retriever.search(part, topk=top_k)
            rows += [ranking(*both, top_k) for both in zip(hits, more, strict=True)]
        return dict(zip(queries["id"], rows, strict=True))


def ranking(hits: Sequence[Hit], more: Sequence[Hit], most: int) -> dict[str, float]:
    """A ranking of at most `most` hits: passage id → score, which falls.

    `hits` come first, the best of every step, then the second; `more` behind them in their order.
    """
    scores: dict[str, float] = {}
    last = np.float32(np.inf)
    for hit in (*by_turns(hits), *more):
        if hit.id not in scores and len(scores) < most:
            # In float32, as trec_eval compares.
            last = min(np.float32(hit.score), np.nextafter(last, np.float32(-np.inf)))
            scores[hit.id] = float(last)
    return scores


def _check_text(rows: Any, what: str, task: str) -> None:
    if "text" not in rows.column_names or not isinstance(rows[0]["text"], str):
        raise InputError(f"the {what} of {task} are no texts (column text); choose another task.")


def _lines(corpus: Any) -> Iterator[bytes]:
    for row in corpus:
        fields = {"id": row["id"], "title": row.get("title") or "", "text": row["text"] or ""}
        yield json.dumps(fields).encode() + b"\n"
