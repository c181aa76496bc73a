"""The flags of `search` and `serve` that say which index is searched, and by what.

What searches is a run (`--workdir`), an export (`--retriever`), a plain encoder (`--encoder`), or
none of them: then words are compared. This module needs no jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.retrieval.index_folder import ENGINES, IndexAt
from qrag_jax.runtime import commandline
from qrag_jax.systems.retriever import LoadSettings, PlainEncoder, Retriever, SingleStepRetriever

INDEX = flags.DEFINE_string("index", None, "Folder of the index, which qrag index wrote.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a trained run.")
RETRIEVER = flags.DEFINE_string("retriever", None, "Folder of an exported run.")
ENCODER = flags.DEFINE_string("encoder", None, "Plain encoder: folder, hub name, or minilm.")
ENGINE = flags.DEFINE_enum("engine", "", ["", *ENGINES], "What searches it; none: the usual.")
QDRANT = flags.DEFINE_string("qdrant", "", "URL of its Qdrant server; none: as in qrag index.")
CHECKPOINT = flags.DEFINE_enum("checkpoint", "", ["", "best", "last"], "With --workdir.")
COMPUTE = flags.DEFINE_enum("compute", "auto", ["auto", "float32", "bfloat16"], "dtype of jax.")
PREFIX = flags.DEFINE_string("question_prefix", "", "With --encoder: text before questions.")
CHUNK_PREFIX = flags.DEFINE_string("chunk_prefix", "", "With --encoder: as in qrag index.")
TOKENS = flags.DEFINE_integer("max_chunk_tokens", 0, "With --encoder: as in index.", lower_bound=0)
POOLING = flags.DEFINE_string("pooling", "", "With --encoder: as in qrag index.")

RUN, EXPORT, PLAIN, WORDS = KINDS = ("--workdir", "--retriever", "--encoder", "words alone")
# Flag → the searches that read it.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "checkpoint": (RUN,),
    "compute": (RUN, EXPORT, PLAIN),
    **dict.fromkeys(("question_prefix", "chunk_prefix", "max_chunk_tokens", "pooling"), (PLAIN,)),
}


def kind(further: Mapping[str, tuple[str, ...]] | None = None) -> str:
    """Which of `KINDS` searches."""
    given = [name for name in KINDS[:-1] if flags.FLAGS[name.removeprefix("--")].value]
    if len(given) > 1:
        raise InputError(f"give one of {' and '.join(given)}.")
    (chosen,) = given or [WORDS]
    commandline.refuse_unread({**READ_BY, **(further or {})}, chosen, "a search with ")
    return chosen


def index() -> IndexAt:
    if not INDEX.value:
        raise InputError("give the folder of an index, for example --index=indexes/wiki.")
    return IndexAt(Path(INDEX.value).expanduser(), ENGINE.value, QDRANT.value)


def trained(**how: Any) -> tuple[str, LoadSettings]:
    """The folder of the trained retriever, "": there is none; and how it is computed."""
    folder = WORKDIR.value or RETRIEVER.value or ""
    if folder and not Path(folder).expanduser().is_dir():
        raise InputError(f"{folder} is no folder; give --workdir=RUN or --retriever=EXPORT.")
    dtype = "" if COMPUTE.value == "auto" else COMPUTE.value
    settings = LoadSettings(checkpoint=CHECKPOINT.value, dtype=dtype, **how)
    return folder, settings


def plain_encoder() -> PlainEncoder | None:
    """The plain encoder, which needs jax; None: words are compared."""
    if not ENCODER.value:
        return None
    from qrag_jax.models.first_encoder import EncoderConfig

    how: Any = {"state_prefix": PREFIX.value, "chunk_prefix": CHUNK_PREFIX.value}
    config = EncoderConfig(dtype=COMPUTE.value, pooling=POOLING.value, **how)
    return PlainEncoder(ENCODER.value, config, TOKENS.value)


def opened(**how: Any) -> Retriever:
    """The retriever that the flags name, with its index open; `how`: further `LoadSettings`."""
    (folder, settings), at = trained(**how), index()
    retriever = Retriever.load(folder, settings) if folder else SingleStepRetriever(plain_encoder())
    retriever.open(at.folder, at.engine, at.url)
    return retriever
