"""Digests of model folders: by every byte, which is read once."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from qrag_jax.llm.config import ServerConfig
from qrag_jax.llm.server import model_digest as module


@pytest.fixture
def digest(tmp_path: Path) -> Callable[[Path], str]:
    return partial(module.model_digest, cache=tmp_path / "cache", log=print)


def write(folder: Path, **files: bytes) -> Path:
    """Files by their names, `_` for the last dot's place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / ".".join(name.rsplit("_", 1))).write_bytes(content)
    return folder


def test_every_byte_and_name_counts_and_places_do_not(
    tmp_path: Path, digest: Callable[[Path], str]
) -> None:
    same = bytes(1 << 20)
    for name in ("model_safetensors", "pytorch_model_bin", "a_pt"):
        digests = {
            digest(write(tmp_path / name / str(n), **{name: same + bytes([n]) + same}))
            for n in range(3)
        }
        assert len(digests) == 3
    one = write(tmp_path / "one" / "final", a_safetensors=b"1", b_safetensors=b"2")
    write(one, README_md=b"whatever")
    other = write(tmp_path / "other" / "final", a_safetensors=b"1", b_safetensors=b"2")
    swapped = write(tmp_path / "swapped" / "final", b_safetensors=b"1", a_safetensors=b"2")
    assert digest(one) == digest(other) != digest(swapped)
    write(other / "extra", tool_jinja=b"{{ tools }}")
    assert digest(other) != digest(one)
    assert digest(tmp_path / "none") == ""


def test_settings_of_the_server_that_change_answers_count_too(
    tmp_path: Path, digest: Callable[[Path], str]
) -> None:
    folder = write(tmp_path / "m", config_json=b"{}", model_safetensors=b"w")
    served_version = partial(module.served_version, cache=tmp_path / "cache", log=print)
    usual = ServerConfig(str(folder), port=2, memory_share=0.9)
    weights = served_version(usual)
    assert weights == digest(folder)
    for more in ({"dtype": "float32"}, {"arguments": ("--revision", "v2")}):
        assert served_version(dataclasses.replace(usual, **more)).startswith(f"{weights}+")
    # Of the hub's weights nothing is known here, of what is asked of them something is.
    assert served_version(ServerConfig("Qwen/Qwen3-4B")) == ""
    assert served_version(ServerConfig("Qwen/Qwen3-4B", arguments=("--revision", "v2"))) != ""


def test_a_file_is_read_again_only_if_it_changed(
    tmp_path: Path, digest: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = module._read

    def counted(path: Path, cache: Path) -> str:
        reads.append(path.name)
        return read(path, cache)

    monkeypatch.setattr(module, "_read", counted)
    monkeypatch.setattr(module, "_SETTLED_SECONDS", -1.0)  # else each file is too young to be kept
    folder = write(tmp_path / "m", config_json=b"{}", model_safetensors=b"one")
    path = folder / "model.safetensors"
    before, first = path.stat(), digest(folder)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    reads.clear()
    assert digest(folder) == first
    assert reads == []
    time.sleep(0.02)  # of the file system's clock
    # In place, and dated back as copying tools do; then another file in its place.
    for content, replace in ((b"two", False), (b"six", True), (b"one", False)):
        target = folder / "new" if replace else path
        target.write_bytes(content)
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        target.replace(path)
        assert (digest(folder) == first) == (content == b"one")
        assert reads == ["model.safetensors"]
        reads.clear()
