"""`retriever.json`, the file that makes a folder of exported towers a whole retriever.

It says all that a search needs besides the two models: how states are composed, how long texts may
be, where chunks are rotated, how actions are searched and when a search stops. This module needs
neither jax nor flax nor torch, so that any environment can read the file.

Composing a state: the question's first `max_question_tokens` tokens, then of each chunk taken its
first `max_chunk_tokens_in_state` tokens, joined by `separator` without spaces; chunks in document
order if `sort_by_index`, else in the order taken. The towers' tokenizers add the opening token, the
prefix and the last separator, and cut rows at `Tower.max_tokens`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from qrag_jax.errors import Count, Filled, InputError, Natural, Positive, Rule, Share, least, one_of
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.whole_files import reading, sha256, write_whole

NAME = "retriever.json"
TITLE_SEPARATOR = " "  # between a title and a text, unless a run's data have another one
FORMAT = 2  # of the file; grows when a field is added or means something else
# What this format knows. A test compares these names with those of the trainer.
NO_POSITIONS = "none"  # no chunk is rotated
POSITIONS = (NO_POSITIONS, "absolute", "random", "random_published", "relative")
POLICY, SUM, LAST = BEAM_SCORES = ("policy", "sum", "last")
MAX_BYTES = 2**20
PLAIN = re.compile(r"[A-Za-z0-9][\w.-]{0,200}")  # names of folders and files below the folder
EXPORT = "export the run again"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = Rule(PLAIN.fullmatch, "it must be a plain name")
_WEIGHTS = Rule(
    lambda digests: all(PLAIN.fullmatch(k) and _DIGEST.fullmatch(v) for k, v in digests.items()),
    "it must give each file of weights its SHA-256 in hex",
)
_Format = Annotated[int, Rule(FORMAT.__eq__, f"this qrag_jax reads {FORMAT} alone")]


def passage_text(title: str, text: str, separator: str = TITLE_SEPARATOR) -> str:
    """A passage as it is embedded, searched and shown: its title, if any, before its text."""
    return separator.join(filter(None, (title.strip(), text.strip())))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """One of the two models."""

    folder: Annotated[str, _NAME]  # next to the file, as sentence-transformers reads it
    prefix: str  # the text that its rows begin with; the tokenizer in the folder adds it
    max_tokens: Count  # of its longest row, special ones included; its tokenizer cuts longer ones
    width: Annotated[int, least(2)]  # D, of its vectors; even, each half is one critic
    # Factor on the vectors that only the module Dense of the folder holds; 1: there is no such
    # module. A server that skips it gives vectors too short by this factor.
    scale: Positive
    # SHA-256 of each file of weights in the folder, by its name
    weights: Annotated[Mapping[str, str], _WEIGHTS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positions:
    """Where chunk vectors are rotated before the inner product (arXiv 2511.07328).

    Each half of a vector (width H = D/2) is rotated by itself: its pair (2j, 2j+1) turns by the
    angle p·theta^(-2j/H), p the chunk's position. States are not rotated.

    Kind "none": no rotation; "absolute" and "random" (in a search the same): p = 0, 1, 2, …;
    "relative": the m chunks between two taken ones stand at step·j + ⌊linspace(0, span, m)⌋, j the
    number of taken ones up to there; "random_published": 0, 1, 2, … with an indent drawn for each
    of `parts` parts, for documents of at most `most_chunks` chunks.
    """

    kind: Annotated[str, one_of(POSITIONS)]
    theta: Positive  # base of the angles
    step: Count
    span: Count
    parts: Count
    most_chunks: Count

    def __post_init__(self) -> None:
        overlap = f"span is {self.span} and step {self.step}, so that intervals would overlap"
        _check(self.span < self.step, overlap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """How actions are searched, and when a search stops."""

    max_steps: Count  # T, chunks taken at most
    beam: Count  # W, paths kept at every step; 1 is greedy
    # What ranks paths: "policy", Σ log π with π = softmax(Q / alpha) over the best
    # max(top_k_actions, W) chunks and STOP; "sum", Σ gamma^t·Q; or "last", the newest Q. Q falls
    # once all facts are found, so "sum" and "last" rank a path that finds them late above one that
    # finds them early: they are for documents that need every step.
    beam_score: Annotated[str, one_of(BEAM_SCORES)]
    gamma: Share  # γ of the sum
    alpha: Positive  # α, the temperature of the policy
    top_k_actions: Count
    stop_action: bool  # whether the empty text, embedded as a chunk, is the action STOP
    # A search stops before a chunk whose Q is not above it; None, or -inf: never
    stop_threshold: float | None

    @property
    def threshold(self) -> float:
        return -math.inf if self.stop_threshold is None else self.stop_threshold

    @property
    def actions(self) -> int:
        """The number of best actions that are looked at in each state."""
        ranked = self.beam > 1 and self.beam_score == POLICY
        return max(self.beam, self.top_k_actions) if ranked else self.beam


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieverConfig:
    """The content of `retriever.json`; its fields have the names that they have in the file."""

    format: _Format
    library_version: Filled  # version of qrag_jax that exported the towers
    base_model: str  # hub name, or last part of the path; "": an encoder from scratch
    state: Tower
    chunk: Tower
    digest: Filled  # of the tower of chunks and its rows; an index that it embedded has the same
    title_separator: Filled  # between a passage's title and its text (see `passage_text`)
    separator: Filled  # the token between the parts of a state, as it is written in texts
    separator_id: Natural  # in both tokenizers
    max_question_tokens: Count  # longer questions are cut
    max_chunk_tokens_in_state: Count  # longer chunks are cut inside a state
    sort_by_index: bool  # whether a state lists chunks in document order, else as taken
    positions: Positions
    search: Search

    def __post_init__(self) -> None:
        state, chunk, turns = self.state, self.chunk, self.positions.kind != "none"
        same = f"state.folder and chunk.folder are both {state.folder}"
        _check(state.folder != chunk.folder, same)
        widths = f"state.width is {state.width} and chunk.width {chunk.width}"
        _check(state.width == chunk.width, widths)
        pairs = "both halves are rotated in pairs" if turns else "a vector has two halves"
        split = state.width % (4 if turns else 2) == 0
        _check(split, f"state.width is {state.width}, but {pairs}")

    @classmethod
    def read(cls, folder: Path) -> RetrieverConfig:
        path = folder / NAME
        with reading(path, f"{EXPORT}, or give a folder that qrag_jax.export wrote"):
            config = bounded_json.typed(cls, bounded_json.content(path, MAX_BYTES))
            for name in ("state", "chunk"):  # a run has none, an exported folder does
                _check(getattr(config, name).weights, f"{name}.weights names no file of weights")
            return config

    def write(self, folder: Path) -> None:
        """Writes the file into a folder, or raises `OSError`."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        write_whole(folder / NAME, text + "\n")

    def check_weights(self, folder: Path) -> None:
        """Compares the weights in the towers' folders with their digests."""
        for tower in (self.state, self.chunk):
            for name, digest in tower.weights.items():
                path = folder / tower.folder / name
                with reading(path, EXPORT):
                    actual = sha256(path)
                if actual != digest:
                    raise InputError(f"{path}: its SHA-256 is {actual}, not as in {NAME}; {EXPORT}")


def _check(sound: object, message: str) -> None:
    if not sound:
        raise ValueError(message)
