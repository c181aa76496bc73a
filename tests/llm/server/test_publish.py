"""Handing over weights, to a small HTTP server that notes what it is asked and can refuse (see
test_sidecar for vLLM)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qrag_jax.llm.server import publish
from qrag_jax.llm.server.publish import HEAD, WORDS, Published, Publisher, PublishError
from tests.json_server import Call, listening

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, ml_dtypes.bfloat16)}


class Recorder:
    """Answers 200 except to the paths in `refuses`, and keeps what was asked."""

    def __init__(self) -> None:
        self.reset = True  # whether it says that its prefix cache was emptied
        self.calls: list[tuple[str, Any]] = []
        self.refuses: dict[str, int] = {}
        self.tensors: dict[str, np.ndarray] = {}

    def answer(self, call: Call) -> tuple[int, Any]:
        body = json.loads(call.body) if call.body else None
        self.calls.append((call.path, body))
        if call.path == RELOAD:
            (path,) = Path(body["kwargs"]["weights_path"]).glob("*.safetensors")
            self.tensors = load_file(path)
        return self.refuses.get(call.path, 200), {"success": self.reset}

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def publisher(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Publisher]:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(publish, "MEMORY", memory)
    with listening(recorder.answer) as url:
        with Publisher(f"{url}/v1", "m", "", keep=3) as publisher:
            yield publisher
        assert list(memory.iterdir()) == []


PAUSE, RELOAD = "/pause?mode=wait", "/collective_rpc"
EXCHANGE = [PAUSE, RELOAD, "/reset_prefix_cache", "/update_weight_version", "/resume"]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_all_weights(publisher: Publisher, recorder: Recorder, tmp_path: Path) -> None:
    assert publisher.current == Published("m", "")
    assert publisher.publish(WEIGHTS, "7") == publisher.current == Published("m", "7")
    assert recorder.paths() == EXCHANGE
    assert recorder.calls[1][1]["method"] == "reload_weights"
    assert recorder.calls[3][1] == {"new_version": "7"}
    assert recorder.tensors.keys() == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        assert recorder.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(recorder.tensors[name], array)
    # A transposed array lies otherwise in memory; the file has its rows.
    publisher.publish({**WEIGHTS, "a": np.asfortranarray(WEIGHTS["a"])}, "8")
    np.testing.assert_array_equal(recorder.tensors["a"], WEIGHTS["a"])
    # Of the versions written only the present one is kept.
    (folder,) = (tmp_path / "memory").iterdir()
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["2"]
    assert recorder.calls[-4][1]["kwargs"]["weights_path"] == str(folder / "2")


def test_a_tied_head_is_written_by_its_name(publisher: Publisher, recorder: Recorder) -> None:
    words = np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16)
    cases: list[dict[str, np.ndarray]] = [{}, {HEAD: words + words}]
    for heads in cases:
        publisher.publish({WORDS: words} | heads, f"version-{len(heads)}")
        assert recorder.tensors.keys() == {WORDS, HEAD}
        np.testing.assert_array_equal(recorder.tensors[HEAD], heads.get(HEAD, words))


def adapter(folder: Path) -> None:
    """Writes one."""
    (folder / "adapter_config.json").write_text('{"r": 4}')
    save_file({"x": np.ones(2, np.float32)}, folder / "adapter_model.safetensors")


def loaded(recorder: Recorder) -> list[str]:
    """The adapters that the server has by the calls so far, the oldest first."""
    names: dict[str, Path] = {}
    for path, body in recorder.calls:
        if path == LOAD:
            assert body["lora_name"] not in names
            names[body["lora_name"]] = Path(body["lora_path"])
        elif path == UNLOAD:
            del names[body["lora_name"]]
    # vLLM may read their files again.
    assert all((folder / "adapter_model.safetensors").is_file() for folder in names.values())
    return list(names)


def test_several_versions_stay_loaded(
    publisher: Publisher, recorder: Recorder, tmp_path: Path
) -> None:
    for count, version in enumerate("abcdef", 1):
        publisher.publish(adapter, version)
        newest = [f"m@{each}" for each in "abcdef"[max(0, count - 3) : count]]
        assert loaded(recorder) == newest
        (folder,) = (tmp_path / "memory").iterdir()
        files = [path for path in folder.iterdir() if path.name != ".lock"]
        # The last one unloaded may be read once more, for an answer in flight.
        assert len(files) == min(count, 4)
    # The restarted server has none; it gets all of them under their names.
    publisher.forget()
    assert publisher.current == Published("m@f", "")
    recorder.calls.clear()
    publisher.republish()
    assert loaded(recorder) == ["m@d", "m@e", "m@f"]
    assert publisher.current == Published("m@f", "f")


def test_new_weights_replace_the_adapters_of_the_earlier_ones(
    publisher: Publisher, recorder: Recorder
) -> None:
    publisher.publish(adapter, "1")
    publisher.publish(adapter, "2")
    recorder.calls.clear()
    publisher.publish(WEIGHTS, "full")
    assert recorder.paths() == [EXCHANGE[0], UNLOAD, UNLOAD, *EXCHANGE[1:]]
    recorder.calls.clear()
    publisher.publish(adapter, "3")
    publisher.republish()
    assert recorder.paths() == [LOAD, *EXCHANGE, LOAD]
    assert publisher.current == Published("m@3", "3")


def test_refusals_of_the_server(publisher: Publisher, recorder: Recorder) -> None:
    """Nothing was touched, or half exchanged weights answer nothing: it stays paused."""
    for step, path in enumerate(EXCHANGE):
        publisher.publish(WEIGHTS, f"good-{step}")
        recorder.calls.clear()
        recorder.refuses = {path: 500}
        with pytest.raises(PublishError, match="HTTP 500"):
            publisher.publish(WEIGHTS, "bad")
        # At the first step, a pause that had begun is over.
        assert recorder.paths() == ([PAUSE, "/resume"] if step == 0 else EXCHANGE[: step + 1])
        assert publisher.current.version == ("good-0" if step == 0 else "")
        recorder.refuses = {}
    recorder.reset = False
    with pytest.raises(PublishError, match="prefix cache"):
        publisher.publish(WEIGHTS, "1")
    recorder.refuses = {PAUSE: 404}
    with pytest.raises(PublishError, match=r"config\.llm\.server\.publish=True"):
        publisher.publish(WEIGHTS, "1")
