"""The rows of the suite which: what runs each, how often, where, and what it must be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from benchmarks.which_cases import contrast, single, writers
from benchmarks.which_cases.contrast_row import contrastive
from benchmarks.which_cases.found import Found
from benchmarks.which_cases.harr_row import harr
from benchmarks.which_cases.leret_row import leret
from benchmarks.which_cases.q_rag_row import q_rag, q_rag_mined
from benchmarks.which_cases.rewrite_row import deepretrieval, pseudo_document
from benchmarks.which_cases.rlvr_row import rlvr
from benchmarks.which_cases.row import UNTRAINED, Place, Result
from benchmarks.which_cases.settings import HOTPOTQA, SETTINGS, TWO_WIKI, Setting
from qrag_jax.errors import InputError
from qrag_jax.runtime.minilm import find_minilm

SEEDS = (42, 43, 44)
LONG = 28.0  # minutes
MINILM, SMOLLM2, SENTENCE_TRANSFORMERS = "MiniLM", "SmolLM2", "sentence-transformers"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: in the names of parts.
        title: in tables.
        run: gives the result of one training, or of none.
        told: what it must be told of the training questions; "": nothing is trained.
        in_use: what it must be told of the questions that it is asked.
        seeds: of its trainings; (): nothing is trained.
        settings: where the whole suite runs it; elsewhere it runs if it is named.
        refused: where it cannot be run, and why.
        needs: what must be on this machine.
        minutes: of one part on 2 cores, estimated (docs/which.md).
    """

    name: str
    title: str
    run: Callable[[Place], Result]
    told: str = ""
    in_use: str = ""
    seeds: tuple[int, ...] = ()
    settings: tuple[str, ...] = SETTINGS
    refused: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    minutes: float = 1.0

    @property
    def is_long(self) -> bool:
        """Whether further seeds are run when all rows have one, and only on their own test."""
        return self.minutes >= LONG

    @property
    def parts(self) -> list[str]:
        """Names of a setting's parts, without the setting."""
        return [f"{self.name}-{seed}" for seed in self.seeds] or [self.name]


def _searched(search: Callable[[Setting], Found], place: Place) -> Result:
    given = place.setting
    return Result({UNTRAINED: {given.name: search(given)}})


GOLD, ANSWERS = "gold passages", "answers"
NO_DECOMPOSITION = (
    (
        HOTPOTQA,
        "HotpotQA has no decompositions, which the scripted agent follows; an agent with a "
        "language model needs a server (docs/harr.md)",
    ),
)


SMALL = partial(deepretrieval, variant="ir")
LARGE = partial(deepretrieval, variant="smol")
ROWS = (
    Row("bm25", "BM25", partial(_searched, single.bm25)),
    Row("expansion", "BM25, expansion by feedback", partial(_searched, single.expansion)),
    Row(
        "second_hop",
        "BM25, then with its first passage",
        partial(_searched, single.second_hop),
    ),
    Row("minilm", "MiniLM", partial(_searched, single.minilm), needs=(MINILM,)),
    Row("hybrid", "BM25 and MiniLM", partial(_searched, single.hybrid), needs=(MINILM,)),
    Row("passage", "pseudo-document by SmolLM2", pseudo_document, needs=(SMOLLM2,), minutes=15),
    Row(
        "contrastive",
        "MiniLM, contrastive",
        contrastive,
        told=GOLD,
        seeds=SEEDS,
        needs=(MINILM, SENTENCE_TRANSFORMERS),
        minutes=22,
    ),
    Row("q_rag", "Q-RAG", q_rag, told=GOLD, seeds=SEEDS, needs=(MINILM,), minutes=22),
    Row(
        "q_rag_mined",
        "Q-RAG, mined negatives",
        q_rag_mined,
        told=GOLD,
        seeds=SEEDS,
        settings=(HOTPOTQA,),
        needs=(MINILM,),
        minutes=25,
    ),
    *(
        Row(
            f"harr_{algorithm}",
            f"HARR, {algorithm.upper()}",
            partial(harr, algorithm=algorithm),
            told=f"decompositions, {ANSWERS}",
            in_use=f"decompositions, {ANSWERS}",
            seeds=SEEDS,
            settings=(TWO_WIKI,),
            refused=NO_DECOMPOSITION,
            needs=(MINILM,),
            minutes=12,
        )
        for algorithm in ("grpo", "ppo")
    ),
    *(
        Row(
            name,
            title,
            run,
            told=told,
            seeds=SEEDS,
            settings=settings,
            needs=(SMOLLM2, MINILM) if run is not SMALL else (MINILM,),
            minutes=minutes,
        )
        for name, title, run, told, settings, minutes in (
            ("deepretrieval_small", "DeepRetrieval, 1.8M decoder", SMALL, GOLD, (TWO_WIKI,), 30),
            ("leret", "LeReT, SmolLM2", leret, GOLD, SETTINGS, 40),
            ("deepretrieval", "DeepRetrieval, SmolLM2", LARGE, GOLD, SETTINGS, 45),
            ("rlvr", "RLVR, SmolLM2", rlvr, f"{GOLD}, {ANSWERS}", (TWO_WIKI,), 70),
        )
    ),
)
# Systems whose decoder of 1.8 million weights speaks of the invented world alone.
NOT_SMALL = (
    "RLVR and LeReT with the 1.8M decoder: its demonstrations are of the invented world alone, so "
    "it cannot be trained on these questions (docs/rlvr.md, docs/leret.md)",
)


def lacking(row: Row) -> str:
    """Why a row is not installed, in words; "": it is."""
    for need in row.needs:
        if need == SENTENCE_TRANSFORMERS and not contrast.is_installed():
            return contrast.INSTALL
        if need == MINILM and find_minilm(download=False) is None:
            return "MiniLM is not on this machine; name its folder in QRAG_MINILM"
        if need == SMOLLM2:
            try:
                writers.smollm2()
            except InputError as error:
                return str(error).rstrip(".")
    return ""
