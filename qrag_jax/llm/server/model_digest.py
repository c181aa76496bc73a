"""Computes digests of model folders, to tell weights apart in folders of the same name.

It reads all files, about a second per gigabyte. So the digest of each file is cached in a small
file, by the file's path, size, times and inode. It does not notice a change that leaves all of
these the same (a damaged disk, a clock set back).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.llm.config import ServerConfig
from qrag_jax.runtime.whole_files import write_whole

# What a server reads: weights, and the files of the model, the tokenizer and the chat template.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".npz"),
    *(".tensors", ".distcp"),
)
_OTHERS = (".json", ".jinja", ".model", ".txt", ".vocab", ".tiktoken", ".yaml", ".yml", ".py")
# Two changes within one tick of a file system's clock (2 s on the coarsest) have the same time. So
# the digest of a file that changed this recently is not cached.
_SETTLED_SECONDS = 2.0
_LOGGED_FROM = 1 << 30  # bytes to be read; from this size on, a line is logged


def model_digest(folder: Path, cache: Path, log: Callable[[str], None]) -> str:
    """A digest of the files in a model's folder that a server reads; "" if there is no such folder.

    The digests of files are kept in the folder `cache`.
    """
    if not folder.is_dir():
        return ""
    files = sorted(
        path
        for path in [*folder.glob("*"), *folder.glob("*/*.jinja")]  # templates may lie deeper
        if path.suffix.lower() in (*_WEIGHTS, *_OTHERS) and path.is_file()
    )
    notes = {path: _note(path, path.stat(), cache) for path in files}
    known = {path: note.read_text() if note.is_file() else "" for path, note in notes.items()}
    missing = [path for path, digest in known.items() if not digest]
    if (size := sum(path.stat().st_size for path in missing)) >= _LOGGED_FROM:
        log(f"reading {folder} once ({size / 1e9:.1f} GB), to know its weights from others.")
    # hashlib releases the interpreter lock while it works.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        known.update(zip(missing, pool.map(lambda path: _read(path, cache), missing), strict=True))
    digest = hashlib.sha256()
    for path, own in known.items():
        digest.update(f"{path.relative_to(folder)} {own}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def served_version(server: ServerConfig, cache: Path, log: Callable[[str], None]) -> str:
    """The version of what our own server answers with.

    It is the folder's digest, followed by a digest of dtype and arguments if they are not the
    defaults: they can select other revisions, other templates, or other ways to load and to round.
    For a model on the hub it is the second part alone: its present weights are not known here.
    """
    weights = model_digest(Path(server.model).expanduser(), cache, log)
    if server.dtype == "auto" and not server.arguments:
        return weights
    own = hashlib.sha256(json.dumps([server.dtype, server.arguments]).encode()).hexdigest()[:8]
    return f"{weights}+{own}" if weights else own


def _read(path: Path, cache: Path) -> str:
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            after = os.fstat(file.fileno())
    except OSError as error:
        raise InputError(
            f"config.llm.server.model: {path} cannot be read ({error.strerror})."
        ) from None
    settled = time.time() - max(after.st_mtime, after.st_ctime) > _SETTLED_SECONDS
    if settled and _note(path, before, cache) == _note(path, after, cache):
        with contextlib.suppress(OSError):  # else it is read again next time
            write_whole(_note(path, after, cache), digest)
    return digest


def _note(path: Path, stat: os.stat_result, cache: Path) -> Path:
    """Where the digest of a file in this state is cached.

    Users can set the time of the last change of the content, and copying tools preserve it; that of
    the last change of any kind (ctime) they cannot.
    """
    state = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    name = hashlib.sha256(os.fsencode(path.resolve()) + repr(state).encode()).hexdigest()[:32]
    return cache / "model_digests" / name
