"""Handing over weights, to a small HTTP server that notes what it is asked and can refuse (see
test_sidecar for vLLM)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qrag_jax.llm.server.publish import Published, Publisher, PublishError
from tests.json_server import Call, listening

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, ml_dtypes.bfloat16)}


class Recorder:
    """Answers 200 except to the paths in `refuses`, and keeps what was asked."""

    def __init__(self) -> None:
        self.url, self.reset = "", True
        self.calls: list[tuple[str, Any]] = []
        self.refuses: dict[str, int] = {}
        self.found: dict[str, np.ndarray] = {}

    def answer(self, call: Call) -> tuple[int, Any]:
        body = json.loads(call.body) if call.body else None
        self.calls.append((call.path, body))
        if call.path == "/collective_rpc":
            self.found = {}
            for path in Path(body["kwargs"]["weights_path"]).glob("*.safetensors"):
                self.found |= load_file(path)
        return self.refuses.get(call.path, 200), {"success": self.reset}

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with listening(recorder.answer) as url:
        recorder.url = f"{url}/v1"
        yield recorder


@pytest.fixture
def publisher(recorder: Recorder, tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(recorder.url, "m", folder=tmp_path / "memory") as publisher:
        yield publisher
    assert list((tmp_path / "memory").iterdir()) == []


EXCHANGE = [
    "/pause?mode=wait",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_all_weights(publisher: Publisher, recorder: Recorder, tmp_path: Path) -> None:
    assert publisher.current == Published("m", "")
    assert publisher.publish(WEIGHTS, "7") == publisher.current == Published("m", "7")
    assert recorder.paths() == EXCHANGE
    assert recorder.calls[1][1]["method"] == "reload_weights"
    assert recorder.calls[3][1] == {"new_version": "7"}
    assert recorder.found.keys() == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        assert recorder.found[name].dtype == array.dtype
        np.testing.assert_array_equal(recorder.found[name], array)
    # A transposed array lies otherwise in memory; the file has its rows.
    publisher.publish({**WEIGHTS, "a": np.asfortranarray(WEIGHTS["a"])}, "8")
    np.testing.assert_array_equal(recorder.found["a"], WEIGHTS["a"])
    # Of the versions written only the present one is kept.
    (folder,) = (tmp_path / "memory").iterdir()
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["2"]
    assert recorder.calls[-4][1]["kwargs"]["weights_path"] == str(folder / "2")


WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_tied_head_is_told_by_its_name(recorder: Recorder, tmp_path: Path) -> None:
    words = np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16)
    with Publisher(recorder.url, "m", folder=tmp_path / "memory") as publisher:
        for version, head in (("tied", None), ("own", words + words)):
            tensors = {WORDS: words} | ({} if head is None else {HEAD: head})
            publisher.publish(tensors, version)
            assert recorder.found.keys() == {WORDS, HEAD}
            np.testing.assert_array_equal(recorder.found[HEAD], words if head is None else head)


@pytest.fixture
def adapter() -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text('{"r": 4}')
        save_file({"x": np.ones(2, np.float32)}, folder / "adapter_model.safetensors")

    return write


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
    recorder: Recorder, adapter: Callable[[Path], None], tmp_path: Path
) -> None:
    own = tmp_path / "memory"
    with Publisher(recorder.url, "m", folder=own, keep=3) as publisher:
        for count, version in enumerate("abcdefgh", 1):
            publisher.publish(adapter, version)
            newest = [f"m@{each}" for each in "abcdefgh"[max(0, count - 3) : count]]
            assert loaded(recorder) == newest
            (folder,) = own.iterdir()
            files = [path for path in folder.iterdir() if path.name != ".lock"]
            # The last one unloaded may be read once more, for an answer under way.
            assert len(files) == min(count, 4)
        # The restarted server has none; it gets all of them under their names.
        publisher.forget()
        assert publisher.current == Published("m@h", "")
        recorder.calls.clear()
        publisher.republish()
        assert recorder.paths() == [LOAD] * 3
        assert loaded(recorder) == ["m@f", "m@g", "m@h"]
        assert publisher.current == Published("m@h", "h")
        publisher.publish(adapter, "i")
        assert loaded(recorder) == ["m@g", "m@h", "m@i"]


def test_new_weights_take_the_adapters_of_the_earlier_ones_along(
    publisher: Publisher, recorder: Recorder, adapter: Callable[[Path], None]
) -> None:
    publisher.republish()
    assert recorder.calls == []
    publisher.publish(adapter, "1")
    publisher.publish(adapter, "2")
    recorder.refuses["/collective_rpc"] = 500
    with pytest.raises(PublishError):
        publisher.publish(WEIGHTS, "full")
    recorder.refuses.clear()
    publisher.republish()  # the server is restarted, and is as before
    recorder.calls.clear()
    publisher.publish(WEIGHTS, "full")
    assert recorder.paths() == [EXCHANGE[0], UNLOAD, UNLOAD, *EXCHANGE[1:]]
    recorder.calls.clear()
    publisher.publish(adapter, "3")
    publisher.republish()
    assert recorder.paths() == [LOAD, *EXCHANGE, LOAD]
    assert publisher.current == Published("m@3", "3")


@pytest.mark.parametrize("step", range(len(EXCHANGE)))
def test_refused(step: int, publisher: Publisher, recorder: Recorder) -> None:
    publisher.publish(WEIGHTS, "good")
    recorder.calls.clear()
    recorder.refuses[EXCHANGE[step]] = 500
    with pytest.raises(PublishError, match="HTTP 500"):
        publisher.publish(WEIGHTS, "bad")
    if step == 0:
        # Nothing was touched, and a pause that had begun is over.
        assert recorder.paths() == [EXCHANGE[0], "/resume"]
        assert publisher.current.version == "good"
    else:
        # Half exchanged weights answer nothing: it stays paused.
        assert recorder.paths() == EXCHANGE[: step + 1]
        assert publisher.current.version == ""
    recorder.refuses.clear()
    assert publisher.publish(WEIGHTS, "bad").version == "bad"  # the same once more, without fault


def test_a_cache_that_is_not_emptied(publisher: Publisher, recorder: Recorder) -> None:
    recorder.reset = False
    with pytest.raises(PublishError, match="did not empty"):
        publisher.publish(WEIGHTS, "1")
    assert recorder.paths() == EXCHANGE[:3]
    assert publisher.current.version == ""
    recorder.refuses["/pause?mode=wait"] = 404
    with pytest.raises(PublishError, match=r"config\.llm\.server\.publish=True"):
        publisher.publish(WEIGHTS, "1")
