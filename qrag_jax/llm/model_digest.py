"""Tells the weights of one folder from those of another of the same name, without reading all."""

from __future__ import annotations

import hashlib
from pathlib import Path

_ENDS = 1 << 20  # bytes read at either end of a file


def model_digest(folder: Path) -> str:
    """A digest of a model's folder: its configuration, and of each weight file the name, the size
    and both ends; "" where there is no such folder."""
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    names = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json")
    for path in [folder / name for name in names] + sorted(folder.glob("*.safetensors")):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_ENDS))
                file.seek(max(size - _ENDS, 0))
                digest.update(file.read(_ENDS))
    return digest.hexdigest()[:16]
