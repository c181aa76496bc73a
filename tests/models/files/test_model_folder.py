"""Weights of a folder, sharded or not, and folders named on the hub, fetched by its client."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from qrag_jax.errors import InputError
from qrag_jax.models.files.model_folder import read_config, resolve_folder
from tests.support.small_models import read_tensors

COMMIT = "0123456789" * 4
TENSORS: dict[str, np.ndarray] = {
    "f": np.arange(6, dtype=np.float32).reshape(2, 3),
    "h": np.ones(3, np.float16),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "i": np.arange(4),
}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array)


def torch_tensors() -> dict[str, torch.Tensor]:
    return {
        "f": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "h": torch.ones(3, dtype=torch.float16),
        "b": torch.arange(4).bfloat16(),
        "i": torch.arange(4),
    }


def write_index(path: Path, shards: dict[str, list[str]]) -> None:
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_file_of_either_kind(tmp_path: Path) -> None:
    torch.save(torch_tensors(), tmp_path / "pytorch_model.bin")
    assert_same(read_tensors(tmp_path), TENSORS)
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even looked at")
    assert_same(read_tensors(tmp_path), TENSORS)


def test_shards_of_either_kind(tmp_path: Path) -> None:
    shards = {"pytorch_model-1.bin": ["f"], "pytorch_model-2.bin": ["h", "b", "i"]}
    for shard, names in shards.items():
        torch.save({name: torch_tensors()[name] for name in names}, tmp_path / shard)
    write_index(tmp_path / "pytorch_model.bin.index.json", shards)
    assert_same(read_tensors(tmp_path), TENSORS)
    shards = {"model-1.safetensors": ["f", "b"], "model-2.safetensors": ["h", "i"]}
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / shard)
    write_index(tmp_path / "model.safetensors.index.json", shards)
    assert_same(read_tensors(tmp_path), TENSORS)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"index\.json: .*model-2\.safetensors"):
        read_tensors(tmp_path)
    save_file({"h": TENSORS["h"]}, tmp_path / "model-2.safetensors")
    with pytest.raises(InputError, match=r"index\.json: .* i\b"):
        read_tensors(tmp_path)


def test_broken_weights_and_indices(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_tensors(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for data in (b"", b"abc", whole[:-3], whole[:20], b"\xff" * 100):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"model\.safetensors"):
            read_tensors(tmp_path)
    path.unlink()
    for text in ("{", "[]", "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(InputError, match=r"index\.json"):
            read_tensors(tmp_path)


def test_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert read_config(tmp_path) == {"hidden_size": 8}
    for data in (b"{", b"\xff\xfe", b"", b"[" * 100_000, b'"x"'):
        (tmp_path / "config.json").write_bytes(data)
        with pytest.raises(InputError, match=r"config\.json"):
            read_config(tmp_path)


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_folder(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("org/name") == Path("org/name")  # before any look at the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_folder("~/org") == tmp_path / "org"


def test_neither_folder_nor_hub_name(tmp_path: Path) -> None:
    for path in (str(tmp_path / "absent"), "./absent", "name", "a/b/c", "../absent", ""):
        with pytest.raises(InputError, match="no such folder"):
            resolve_folder(path)
    file = tmp_path / "model.safetensors"
    file.write_text("x")
    with pytest.raises(InputError, match="is a file"):
        resolve_folder(str(file))


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of the hub's protocol that its real client asks for."""

    files: dict[str, dict[str, bytes]]
    fetched: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        data, extra = self.find(path)
        self.send_response(404 if data is None else 200)
        if data is None:
            data, extra = b"{}", {"X-Error-Code": "RepoNotFound"}
        elif body and "/resolve/" in path:
            self.fetched.append(path.partition(f"{COMMIT}/")[2])
        for key, value in extra.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def find(self, path: str) -> tuple[bytes | None, dict[str, str]]:
        for repo, files in self.files.items():
            if path.startswith(f"api/models/{repo}/tree/"):
                tree = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.md5(d).hexdigest()}  # noqa: S324
                    for n, d in files.items()
                ]
                return json.dumps(tree).encode(), {}
            if path.startswith(f"api/models/{repo}"):
                return json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode(), {}
            name = path.removeprefix(f"{repo}/resolve/{COMMIT}/")
            if name in files:
                etag = f'"{hashlib.md5(files[name]).hexdigest()}"'  # noqa: S324
                return files[name], {"ETag": etag, "X-Repo-Commit": COMMIT}
        return None, {}

    def log_message(self, *arguments: Any) -> None:
        """Keeps the test's output clean."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine that huggingface_hub's real client talks to."""
    Hub.files, Hub.fetched = {}, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    constants = huggingface_hub.constants
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def weights(tmp_path: Path) -> tuple[bytes, bytes]:
    save_file(TENSORS, tmp_path / "x.safetensors")
    torch.save(torch_tensors(), tmp_path / "x.bin")
    return (tmp_path / "x.safetensors").read_bytes(), (tmp_path / "x.bin").read_bytes()


def test_hub_name_fetches_safetensors_and_no_torch_file(tmp_path: Path, hub: type[Hub]) -> None:
    safe, torch_file = weights(tmp_path)
    hub.files["org/name"] = {
        "config.json": b'{"hidden_size": 8}',
        "vocab.txt": b"a\nb\n",
        "1_Pooling/config.json": b"{}",
        "model.safetensors": safe,
        "pytorch_model.bin": torch_file,
        "onnx/config.json": b"{}",
        "README.md": b"text",
        "run.py": b"print()",
    }
    folder = resolve_folder("org/name")
    assert read_config(folder) == {"hidden_size": 8}
    assert_same(read_tensors(folder), TENSORS)
    expected = {"config.json", "vocab.txt", "1_Pooling/config.json", "model.safetensors"}
    assert set(hub.fetched) == expected
    hub.fetched.clear()
    assert resolve_folder("org/name") == folder
    assert hub.fetched == []  # from the cache


def test_hub_name_without_safetensors_fetches_the_torch_file(
    tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_file = weights(tmp_path)[1]
    hub.files["org/old"] = {"config.json": b"{}", "pytorch_model.bin": torch_file}
    folder = resolve_folder("org/old")
    assert set(hub.fetched) == {"config.json", "pytorch_model.bin"}
    assert_same(read_tensors(folder), TENSORS)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_folder("org/old") == folder


def test_unknown_hub_name(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="org/absent") as caught:
        resolve_folder("org/absent")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="org/absent"):
        resolve_folder("org/absent")
