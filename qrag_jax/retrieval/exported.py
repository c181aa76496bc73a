"""An exported retriever without its models: how rows are composed, and how it searches."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.retrieval.chunk_positions import Placement
from qrag_jax.retrieval.multi_step import Rules
from qrag_jax.retrieval.paths import BeamConfig
from qrag_jax.retrieval.tower_rows import RowForm
from qrag_jax.runtime.digests import sha256
from qrag_jax.runtime.retriever_config import EXPORT, RetrieverConfig, Tower

_CARD = "README.md"  # not part of the model


def rules_of(config: RetrieverConfig, per_step: int = 1) -> Rules:
    """How the retriever searches."""
    search, positions = config.search, config.positions
    threshold = -math.inf if search.stop_threshold is None else search.stop_threshold
    beam = BeamConfig(
        beam=search.beam,
        score=search.beam_score,
        gamma=search.gamma,
        alpha=search.alpha,
        top_k_actions=search.top_k_actions,
        stop_threshold=threshold,
    )
    return Rules(
        max_steps=search.max_steps,
        sort_by_index=config.sort_by_index,
        beam=beam,
        stop_action=search.stop_action,
        placement=Placement(positions.kind, positions.theta, positions.step, positions.span),
        per_step=per_step,
        title_separator=config.title_separator,
    )


def form_of(config: RetrieverConfig, state: tuple[int, ...], chunk: tuple[int, ...]) -> RowForm:
    """How rows are composed."""
    return RowForm(
        state_opening=state,
        chunk_opening=chunk,
        sep_id=config.separator_id,
        max_question_tokens=config.max_question_tokens,
        max_chunk_tokens_in_state=config.max_chunk_tokens_in_state,
        state_tokens=config.state.max_tokens,
        chunk_tokens=config.chunk.max_tokens,
        max_chunks=config.search.max_steps - 1,
    )


def read_rows(folder: Path, config: RetrieverConfig) -> tuple[TextTokenizer, RowForm]:
    """The tokenizer of an exported folder, and how rows are composed."""
    state, chunk = (
        TextTokenizer.load(folder / tower.folder, opens_rows=False)
        for tower in (config.state, config.chunk)
    )
    openings = (
        _opening(tokenizer, tower, config)
        for tokenizer, tower in ((state, config.state), (chunk, config.chunk))
    )
    return state, form_of(config, *openings)


def _opening(tokenizer: TextTokenizer, tower: Tower, config: RetrieverConfig) -> tuple[int, ...]:
    """What the tower's tokenizer puts before a text: the opening token and the prefix."""
    ids = tokenizer.backend.encode("", add_special_tokens=True).ids
    if ids[-1:] != [config.separator_id]:
        raise InputError(
            f"{tower.folder}/tokenizer.json: rows do not end with the token {config.separator_id} "
            f"(field separator_id); {EXPORT}."
        )
    return tuple(ids[:-1])


def chunk_digest(folder: Path) -> str:
    """A digest of an exported tower of chunks: of all its files but the model card."""
    names = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _CARD)
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in names}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
