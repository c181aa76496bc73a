"""`retriever.json`: written as read; fields, files and weights that are refused."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.retriever_config import NAME, RetrieverConfig

BYTES = {"state": b"weights of states", "chunk": b"weights of chunks"}


def fields() -> dict[str, Any]:
    """The file as an export writes it."""
    towers = {
        name: {
            **{"folder": name, "prefix": "", "max_tokens": 64, "width": 8, "scale": 1},
            "weights": {"model.safetensors": hashlib.sha256(content).hexdigest()},
        }
        for name, content in BYTES.items()
    }
    return {
        **{"format": 2, "library_version": "0.1.0", "base_model": "facebook/contriever"},
        **towers,
        **{"title_separator": " ", "separator": "[SEP]", "separator_id": 3, "digest": "ab"},
        **{"max_question_tokens": 9, "max_chunk_tokens_in_state": 12, "sort_by_index": False},
        "positions": {
            **{"kind": "relative", "theta": 10000.0, "step": 20, "span": 18},
            **{"parts": 5, "most_chunks": 2000},
        },
        "search": {
            **{"max_steps": 2, "beam": 4, "beam_score": "policy", "gamma": 0.99, "alpha": 0.05},
            **{"top_k_actions": 5, "stop_action": False, "stop_threshold": None},
        },
    }


def read(folder: Path, content: Any) -> RetrieverConfig:
    (folder / NAME).write_text(json.dumps(content))
    return RetrieverConfig.read(folder)


def changed(place: str, value: Any) -> dict[str, Any]:
    """The fields with another value at a place such as "search.beam"; ... deletes it."""
    found = copy.deepcopy(fields())
    *sections, last = place.split(".")
    part = found
    for section in sections:
        part = part[section]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return found


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    for content in (changed("search.stop_threshold", -0.25), fields()):
        config = read(tmp_path, content)
        config.write(tmp_path)
        assert RetrieverConfig.read(tmp_path) == config
        assert json.loads((tmp_path / NAME).read_text()) == content
    assert config.search.stop_threshold is None


WRONG: list[tuple[str, Any]] = [
    *(("format", 1), ("search.beam", ...), ("search.beams", 3), ("separator_id", 2**70)),
    *(("state.folder", "../state"), ("chunk.folder", "state")),
    *(("chunk.width", 4), ("state.weights", {"../x": "0" * 64}), ("positions.kind", "round")),
    *(("state.weights", {"x": "0" * 63}), ("search.stop_threshold", float("inf"))),
]


def test_wrong_fields_are_refused_by_name(tmp_path: Path) -> None:
    for place, value in WRONG:
        with pytest.raises(InputError, match=re.escape(str(tmp_path / NAME))) as raised:
            read(tmp_path, changed(place, value))
        assert all(part in str(raised.value) for part in place.split("."))
        assert "\n" not in str(raised.value)
    # A width must split into halves, and these into pairs if they are rotated.
    for kind, width in (("relative", 6), ("none", 7)):
        content = changed("positions.kind", kind)
        content["state"]["width"] = content["chunk"]["width"] = width
        with pytest.raises(InputError, match=r"state\.width"):
            read(tmp_path, content)


def test_files_that_are_none_and_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"retriever\.json.*No such file"):
        RetrieverConfig.read(tmp_path)
    half = json.dumps(changed("chunk.prefix", "\ud800")).encode()  # of a surrogate pair
    for content in (b"{", b"\xff", b"[]", b"[" * 100_000, b"[1e999]", b" " * (2**20 + 1), half):
        (tmp_path / NAME).write_bytes(content)
        with pytest.raises(InputError, match=r"retriever\.json"):
            RetrieverConfig.read(tmp_path)
    config = read(tmp_path, fields())
    for name, content in BYTES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    config.check_weights(tmp_path)
    weights = tmp_path / "chunk" / "model.safetensors"
    for spoil in (lambda: weights.write_bytes(b"weights of chunkz"), weights.unlink):
        spoil()
        with pytest.raises(InputError, match=str(weights)):
            config.check_weights(tmp_path)
