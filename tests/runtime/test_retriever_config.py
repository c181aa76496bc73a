"""`retriever.json` is read without jax, and refuses what no export writes, in one sentence."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.retriever_config import NAME, RetrieverConfig
from tests.entry_points import ROOT

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
        **{"format": 1, "library_version": "0.1.0", "base_model": "facebook/contriever"},
        **towers,
        **{"title_separator": " ", "separator": "[SEP]", "separator_id": 3},
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


def read(folder: Path, given: Any) -> RetrieverConfig:
    (folder / NAME).write_text(json.dumps(given))
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
    for given in (changed("search.stop_threshold", -0.25), fields()):
        config = read(tmp_path, given)
        config.write(tmp_path)
        assert RetrieverConfig.read(tmp_path) == config
        assert json.loads((tmp_path / NAME).read_text()) == given
    assert config.search.stop_threshold is None


def test_no_library_of_arrays_is_needed(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(fields()))
    code = f"""
import sys
from pathlib import Path
for name in ("jax", "flax", "torch", "numpy", "transformers", "ml_collections", "absl"):
    sys.modules[name] = None  # importing it is an ImportError
from qrag_jax.runtime.retriever_config import RetrieverConfig
print(RetrieverConfig.read(Path({str(tmp_path)!r})).search.beam)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == "4\n"


WRONG: list[tuple[str, Any]] = [
    *(("title_separator", ""), ("format", 2), ("format", "1"), ("format", ...)),
    *(("search.beam", ...), ("search.beams", 3), ("search", 3), ("state", None)),
    *(
        ("library_version", ""),
        ("chunk.prefix", "\ud800"),
        ("state.folder", "../state"),
        ("chunk.folder", "state"),
    ),
    *(("chunk.max_tokens", 0), ("chunk.width", 4), ("chunk.width", 8.0)),
    *(("chunk.scale", 0), ("chunk.scale", float("nan")), ("chunk.scale", 10**400)),
    *(("state.weights", {}), ("state.weights", {"../x": "0" * 64})),
    *(("state.weights", {"x": "0" * 63}), ("separator_id", -1), ("max_question_tokens", True)),
    *(("sort_by_index", 1), ("positions.kind", "round"), ("positions.theta", 0.0)),
    *(("positions.step", 18), ("positions.parts", None), ("search.beam_score", "best")),
    *(("search.gamma", 1.5), ("search.alpha", 0), ("search.stop_threshold", float("-inf"))),
]


@pytest.mark.parametrize(("place", "value"), WRONG)
def test_wrong_fields_are_refused_by_name(place: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        read(tmp_path, changed(place, value))
    assert str(raised.value).startswith(f"{tmp_path / NAME}: ")
    assert all(part in str(raised.value) for part in place.split("."))
    assert "\n" not in str(raised.value)


def test_a_width_must_split_into_halves_and_pairs(tmp_path: Path) -> None:
    for kind, width, told in (
        ("relative", 6, "state.width is 6, but both halves are rotated in pairs"),
        ("none", 7, "state.width is 7, but a vector has two halves"),
    ):
        given = changed("positions.kind", kind)
        given["state"]["width"] = given["chunk"]["width"] = width
        with pytest.raises(InputError, match=told):
            read(tmp_path, given)
    given["state"]["width"] = given["chunk"]["width"] = 6
    assert read(tmp_path, given).state.width == 6


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"retriever\.json: cannot be read \(No such file"):
        RetrieverConfig.read(tmp_path)
    for content, told in (
        (b"{", "line 1 column 2"),
        (b"\xff", "not UTF-8"),
        (b"[]", "no object"),
        (b" " * (2**20 + 1), "has more than 1 MiB"),
    ):
        (tmp_path / NAME).write_bytes(content)
        with pytest.raises(InputError, match=told):
            RetrieverConfig.read(tmp_path)


def test_other_weights_are_found(tmp_path: Path) -> None:
    config = read(tmp_path, fields())
    for name, content in BYTES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    config.check_weights(tmp_path)
    (tmp_path / "chunk" / "model.safetensors").write_bytes(b"weights of chunkz")
    with pytest.raises(InputError, match=r"chunk/model\.safetensors: is not the file that retrie"):
        config.check_weights(tmp_path)
    (tmp_path / "chunk" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"chunk/model\.safetensors: cannot be read \(No such fi"):
        config.check_weights(tmp_path)
