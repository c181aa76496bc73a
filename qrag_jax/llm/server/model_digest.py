"""Tells the weights of one folder from those of another of the same name, by reading all of them.

Reading takes a second or so per gigabyte, so digests of files are kept: by the file's path, size,
times and inode, each in a small file of the cache folder. A file that is changed in place with all
of these as before (a damaged disk, a clock set back) is the one change that is not seen.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import write_whole

# What a server reads: weights, and what says how they are put together, fed and asked.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".npz"),
    *(".tensors", ".distcp"),
)
_OTHERS = (".json", ".jinja", ".model", ".txt", ".vocab", ".tiktoken", ".yaml", ".yml", ".py")
_BLOCK = 1 << 22  # bytes read at a time
_THREADS = 8
# Two changes within a file system's tick have one time (2 s on the coarsest): a file so young is
# read again by the next call.
_SETTLED_SECONDS = 2.0
_TOLD_FROM = 1 << 30  # bytes to be read, of which a word is said


def model_digest(
    folder: Path, cache: Path | None = None, log: Callable[[str], None] = lambda line: None
) -> str:
    """A digest of all that a model's folder holds: each file's name and content.

    Args:
        cache: folder in which the digests of files are kept, None: nothing is kept.
        log: is told once where much has to be read.

    Returns:
        16 hexadecimal digits; "" where there is no such folder.

    Raises:
        InputError: a file cannot be read; names it.
    """
    if not folder.is_dir():
        return ""
    files = sorted(
        path
        for path in [*folder.glob("*"), *folder.glob("*/*.jinja")]  # templates may lie deeper
        if path.suffix.lower() in (*_WEIGHTS, *_OTHERS) and path.is_file()
    )
    known = {path: _kept(path, cache) for path in files}
    missing = [path for path, digest in known.items() if not digest]
    if (size := sum(_size(path) for path in missing)) >= _TOLD_FROM:
        log(f"reading {folder} once ({size / 1e9:.1f} GB), to know its weights from others.")
    # hashlib lets go of the interpreter while it works.
    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        known.update(zip(missing, pool.map(lambda path: _read(path, cache), missing), strict=True))
    digest = hashlib.sha256()
    for path, own in known.items():
        digest.update(f"{path.relative_to(folder)} {own}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def served_version(
    server: Mapping[str, Any],
    cache: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> str:
    """Tells what a server of our own answers with: weights, number format, vLLM's own arguments.

    Arguments name other revisions, templates, ways to load or to round; some change no answer, but
    to ask again costs less than an answer of other weights.

    Args:
        server: fields of `config.llm.server`; of them `model`, `dtype` and `arguments` are read.
        cache, log: as of `model_digest`.

    Returns:
        the folder's digest, and that of the settings where they are not the usual ones. Of a model
        on the hub the settings' alone: which weights it has today is not known here.

    Raises:
        InputError: a file cannot be read; names it.
    """
    weights = model_digest(Path(server["model"]).expanduser(), cache, log)
    dtype, arguments = server.get("dtype", "auto"), list(server.get("arguments", ()))
    if dtype == "auto" and not arguments:
        return weights
    own = hashlib.sha256(json.dumps([dtype, arguments]).encode()).hexdigest()[:8]
    return f"{weights}+{own}" if weights else own


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _read(path: Path, cache: Path | None) -> str:
    """The SHA-256 of a file, kept from then on."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            before = _state(file.fileno(), path)
            block = bytearray(_BLOCK)
            while count := file.readinto(block):
                digest.update(memoryview(block)[:count])
            after = _state(file.fileno(), path)
    except OSError as error:
        raise InputError(
            f"config.llm.server.model: {path} cannot be read ({error.strerror})."
        ) from None
    changed = max(after["mtime_ns"], after["ctime_ns"]) / 1e9
    if cache is not None and before == after and time.time() - changed > _SETTLED_SECONDS:
        _keep(path, cache, {**after, "sha256": digest.hexdigest()})
    return digest.hexdigest()


def _state(file: int | Path, path: Path) -> dict[str, Any]:
    """What a digest is kept by. The time of the last change of any kind (ctime) is no user's to
    set, unlike that of the content (mtime), which copying tools bring along."""
    found = os.stat(file)
    return {
        "path": str(path.resolve()),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def _note(path: Path, cache: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache / "model_digests" / f"{name}.json"


def _kept(path: Path, cache: Path | None) -> str:
    """The digest found earlier for the file as it is now, "" where there is none."""
    if cache is None:
        return ""
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        note = json.loads(_note(path, cache).read_text())
        digest = note.pop("sha256")
        if note == _state(path, path) and len(bytes.fromhex(digest)) == 32:
            return str(digest)
    return ""


def _keep(path: Path, cache: Path, note: dict[str, Any]) -> None:
    """Writes a note; without room for it the file is read again next time."""
    with contextlib.suppress(OSError, UnicodeError):
        write_whole(_note(path, cache), json.dumps(note))
