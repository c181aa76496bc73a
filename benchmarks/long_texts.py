"""Measures a document of very many different texts: its true number of tokens, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Case
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.evaluators.lengths import documents_of_length
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems import q_rag_config
from qrag_jax.systems.q_rag_config import QRagConfig

AT_ONCE = 20_000  # texts tokenised together


class Texts(NamedTuple):
    """Counts of one document.

    Attributes:
        chunks: number of chunks.
        different: number of different chunks.
        tokens: tokens of all chunks, without special tokens, before any cut.
        cut: number of chunks longer than the row limit; they are cut when they are embedded.
    """

    chunks: int
    different: int
    tokens: int
    cut: int


def count_texts(workdir: Path, chunks: int, fields: Sequence[str]) -> Texts:
    """Counts the first evaluation document of `chunks` chunks, with the run's tokenizer.

    Args:
        workdir: folder of the run.
        chunks: length of the document.
        fields: config fields as on the command line: "--config.data.sources.babilong.noise=".
    """
    config = q_rag_config.load_config(workdir / CONFIG_NAME)
    for field in fields:
        name, _, value = field.removeprefix("--config.").partition("=")
        *place, last = name.split(".")
        section = config
        for part in place:
            section = section[part]
        section[last] = type(section[last])(value)
    tokenizer = TextTokenizer.load(workdir / "encoder", opens_rows=False)
    data = QRagConfig.of(config, scoring=True).dev_data
    (document,) = documents_of_length(data, chunks, 1)
    tokens = cut = 0
    for start in range(0, len(document.chunks), AT_ONCE):
        encoded = tokenizer.encode(document.chunks[start : start + AT_ONCE])
        tokens += sum(map(len, encoded))
        cut += sum(len(ids) > data.max_chunk_tokens - 2 for ids in encoded)
    return Texts(len(document.chunks), len(set(document.chunks)), tokens, cut)


def different_cases(made: Sequence[Mapping[str, Any]], texts: Texts, least: int = 1) -> list[Case]:
    """The cases of a document that is played once or more; embeddings are kept from the first time.

    Args:
        made: results of `qrag_jax.evaluate_lengths`, one for each time.
        texts: counts of the document.
        least: required number of different texts.
    """
    about = f"a document of {texts.chunks:,} chunks, {texts.different:,} different texts"
    counted: dict[str, float] = {
        "chunks": texts.chunks,
        "different texts": texts.different,
        "tokens, counted by the tokenizer": texts.tokens,
        "chunks cut at the row limit": texts.cut,
    }
    first, *later = made
    mapped = all(result["mapped_mib"] > 0 for result in made)
    cases = [
        Case(
            f"{about}: tokens",
            texts.tokens,
            "tokens",
            target=f">= {least:,} different texts",
            holds=texts.different >= least,
            details=counted | _measured(first),
        ),
        Case(
            f"{about}: embedding and playing it",
            first["seconds_per_episode"],
            "s an episode",
            target="table memory-mapped, all embedded by this command",
            holds=mapped and first["embedded"] >= texts.different,
        ),
    ]
    cases += [
        Case(
            f"{about}: playing it again, embeddings kept on disk",
            again["seconds_per_episode"],
            "s an episode",
            target="nothing embedded again",
            holds=again["embedded"] == 0,
            details=_measured(again),
        )
        for again in later
    ]
    return cases


def _measured(result: Mapping[str, Any]) -> dict[str, float]:
    names = {
        "fact_em": "fact EM",
        "embedded": "texts embedded by this command",
        "embed_seconds": "embedding them, s",
        "seconds_per_episode": "in all, s",
        "mapped_mib": "table of embeddings mapped from a file, MiB",
        "peak_memory_mib": "peak memory, pages of that file counted, MiB",
    }
    return {label: result[name] for name, label in names.items()}
