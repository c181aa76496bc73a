"""Makes evaluation documents of several lengths, with the same questions at each length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.data.config import DataConfig
from qrag_jax.data.long_docs import Documents, babilong_documents, niah_documents
from qrag_jax.data.sources import BABILONG, NIAH
from qrag_jax.errors import InputError


def documents_of_lengths(
    config: DataConfig,
    lengths: Sequence[int],
    counts: Sequence[int],
    *,
    every_story: bool = False,
) -> dict[int, Documents]:
    """Makes the first documents of each length, from the stories that fit the shortest length.

    Short documents have room only for short stories, which are the easy ones. If each length used
    all stories that fit it, a retriever would look worse on longer documents for that reason alone.

    Args:
        config: the data that are evaluated on.
        lengths: lengths of documents, in chunks.
        counts: number of documents of each length.
        every_story: each length uses all stories that fit it, so the questions differ.
    """
    shortest = 0 if every_story else min(lengths)
    return {
        length: _documents(config, length, count, shortest)
        for length, count in zip(lengths, counts, strict=True)
    }


def _documents(config: DataConfig, chunks: int, count: int, most_facts: int) -> Documents:
    names = [name for name, weight in config.sources.items() if weight]
    if names == [BABILONG]:
        limits = [limit for limit in (config.babilong.most_facts, most_facts) if limit]
        made = dataclasses.replace(
            config.babilong,
            stories=config.path,
            most_facts=min(limits, default=0),
        )
        return babilong_documents(made, "dev", chunks, count)
    if names == [NIAH] and not config.path:
        return niah_documents(config.niah, "dev", chunks, count)
    raise InputError(
        f"documents of {', '.join(names)} cannot be made longer or shorter; score runs of "
        "babilong, or of niah without data files, at several lengths."
    )
