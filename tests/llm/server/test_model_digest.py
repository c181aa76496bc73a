"""Digests of model folders: by every byte."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qrag_jax.llm.config import ServerConfig
from qrag_jax.llm.server import opening
from qrag_jax.runtime.whole_files import model_digest


def write(folder: Path, **files: bytes) -> Path:
    """Files by their names, `_` for the last dot's place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / ".".join(name.rsplit("_", 1))).write_bytes(content)
    return folder


def test_every_byte_and_name_counts_and_places_do_not(tmp_path: Path) -> None:
    same = bytes(1 << 20)
    digests = {
        model_digest(write(tmp_path / str(n), model_safetensors=same + bytes([n]) + same), print)
        for n in range(3)
    }
    assert len(digests) == 3
    one = write(tmp_path / "one" / "final", a_safetensors=b"1", b_safetensors=b"2")
    write(one, README_md=b"whatever")
    other = write(tmp_path / "other" / "final", a_safetensors=b"1", b_safetensors=b"2")
    swapped = write(tmp_path / "swapped" / "final", b_safetensors=b"1", a_safetensors=b"2")
    assert model_digest(one, print) == model_digest(other, print) != model_digest(swapped, print)
    write(other / "extra", tool_jinja=b"{{ tools }}")
    assert model_digest(other, print) != model_digest(one, print)


def test_settings_of_the_server_that_change_answers_count_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", config_json=b"{}", model_safetensors=b"w")
    usual = ServerConfig(str(folder), memory_share=0.9)
    versions = {opening.served_version(usual, print)}
    for more in ({"dtype": "float32"}, {"arguments": ("--revision", "v2")}):
        versions.add(opening.served_version(dataclasses.replace(usual, **more), print))
    (folder / "model.safetensors").write_bytes(b"x")
    versions.add(opening.served_version(usual, print))
    # Of the hub's weights nothing is known here, of what is asked of them something is.
    for arguments in ((), ("--revision", "v2")):
        versions.add(
            opening.served_version(ServerConfig("Qwen/Qwen3-4B", arguments=arguments), print)
        )
    assert len(versions) == 6
