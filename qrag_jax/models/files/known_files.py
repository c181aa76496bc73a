"""Rules for the files of a model folder: known names, names read from its files, and links.

A folder may come from anyone, and a run keeps a copy of it. So only files with known names are
copied, names read from a file (of modules, shards) must be plain, and no link may leave the folder.
The exception is the hub's cache: its links into the `blobs` of the same model are followed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json

VOCABULARY_FILES = (  # a tokenizer needs one of them
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
MODULES, MODEL_CONFIG = "modules.json", "config_sentence_transformers.json"
# Of the first module; older releases of sentence-transformers named it after the architecture.
TRANSFORMER_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
MODULE_FILES = ("config.json", "model.safetensors")  # of a sub-folder such as 1_Pooling
MODULE_FOLDER = re.compile(r"[0-9]{1,3}_[A-Za-z][A-Za-z0-9_]{0,63}")  # as the library names them
SNAPSHOTS, BLOBS, HUB_MODEL = "snapshots", "blobs", "models--"  # of the hub's cache
MAX_JSON_BYTES = 256 * 2**20


class Module(NamedTuple):
    """One entry of `modules.json`: the last part of its class and its sub-folder ("": root)."""

    kind: str
    folder: str


def inside(folder: Path, *names: str) -> Path:
    """The path of a file in a model folder; the file need not exist."""
    path = folder.joinpath(*names)
    try:
        root, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise InputError(
            f"{path}: a link that leads nowhere ({error}); put a file there."
        ) from None
    snapshots = next((above for above in root.parents if above.name == SNAPSHOTS), root)
    model = snapshots.parent
    of_hub = snapshots != root and model.name.startswith(HUB_MODEL)
    if real.is_relative_to(root) or (of_hub and real.parent == model / BLOBS):
        return path
    raise InputError(
        f"{path}: a link out of the model's folder (to {real}), which is not followed; put the "
        "file itself there."
    )


def check_tokenizer_links(folder: Path) -> None:
    """Refuses tokenizer files that link out of the folder (see `inside`): libraries follow them."""
    for name in TOKENIZER_FILES:
        inside(folder, name)


def read_modules(folder: Path) -> list[Module]:
    """The modules of sentence-transformers that `modules.json` names; none if there is no file."""
    path = inside(folder, MODULES)
    if not path.exists():
        return []
    modules = []
    for number, entry in enumerate(read_json(path, list)):
        if not isinstance(entry, dict) or not {"type", "path"} <= entry.keys():
            raise InputError(f"{path}: not a list of objects with type and path.")
        name = entry["path"]
        plain = isinstance(name, str) and MODULE_FOLDER.fullmatch(name)
        if not plain and not (name == "" and number == 0):
            raise InputError(
                f"{path}: the path {bounded_json.shown(name)} of entry {number} is not the name of "
                'a sub-folder such as "1_Pooling"; a model of sentence-transformers has no other.'
            )
        modules.append(Module(str(entry["type"]).rpartition(".")[2], name))
    return modules


def trunk_folder(folder: Path) -> Path:
    """Where config.json, weights and tokenizer are: the folder, or its `0_Transformer`."""
    first, *_ = read_modules(folder) or [Module("", "")]
    return folder / first.folder if first.kind == "Transformer" else folder


def kept_files(folder: Path) -> dict[str, Path]:
    """Every file that is kept with the weights: those of the tokenizer and sentence-transformers.

    Returns:
        path beside the weights → file.
    """
    trunk = trunk_folder(folder)
    names = (*TOKENIZER_FILES, *TRANSFORMER_CONFIGS)
    paths = {name: inside(trunk, name) for name in names}
    paths |= {name: inside(folder, name) for name in (MODULES, MODEL_CONFIG)}
    for module in read_modules(folder):
        if module.folder and folder / module.folder != trunk:
            name = module.folder
            paths |= {f"{name}/{file}": inside(folder, name, file) for file in MODULE_FILES}
    return {name: path for name, path in paths.items() if path.is_file()}


def copy_files(files: Mapping[str, Path], out: Path) -> None:
    """Copies files to these paths in `out`; a file is not copied onto itself."""
    for name, file in files.items():
        target = out / name
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)


def read_json(path: Path, kind: type = dict) -> Any:
    """Parses a JSON file that holds an object (or an array, if `kind` is `list`)."""
    try:
        if not path.is_file():
            raise FileNotFoundError
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InputError(
                f"{path}: has more than {MAX_JSON_BYTES >> 20} MiB, which no such file needs; "
                "download the model again."
            )
        value = bounded_json.load(path, finite=False, most=MAX_JSON_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing; give the folder of a Hugging Face model.") from error
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}).") from error
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "an array"
        raise InputError(f"{path}: holds a {type(value).__name__} where {wanted} is expected.")
    return value
