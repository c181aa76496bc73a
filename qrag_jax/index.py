"""Builds an index of a corpus that a trained retriever, or any encoder, can search.

    qrag index --corpus=FILE_OR_FOLDER --index=OUT --workdir=RUN
    qrag index --corpus=FILE_OR_FOLDER --index=OUT --encoder=FOLDER

The corpus is JSON lines (.jsonl, .jsonl.gz), Parquet, a folder in BEIR's layout, or a folder of
such files. RUN is a trained run, whose tower of chunks embeds the passages. FOLDER is an export of
a run, or any encoder in Hugging Face's layout; "minilm" is all-MiniLM-L6-v2. --engine=bm25 indexes
words and needs neither. If the command is broken off, the same command goes on where it was.

    qrag index --index=OUT --engine=qdrant --server=http://HOST:6333 --collection=NAME

sends finished vectors to a Qdrant server, whose API key is read from QDRANT_API_KEY alone; milvus
and milvus_bm25 (words) read MILVUS_TOKEN. --faiss=IVF4096,Flat --faiss_search=nprobe=64 makes an
index of faiss of them, and prints its recall. With --hosts several hosts embed a corpus together.

    qrag index --index=OUT --encoder=FOLDER --add=MORE.jsonl --remove=IDS.txt

changes a finished index: passages are added, and those of one id a line removed. Only what is added
is embedded. Who has the index open goes on with the old one until all of the new one is there.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from absl import flags

from qrag_jax import systems
from qrag_jax.data.corpora import ALL, Columns
from qrag_jax.errors import InputError
from qrag_jax.models.compute import precision
from qrag_jax.models.embedding import POOLINGS
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.retrieval.building import BY_WORDS
from qrag_jax.retrieval.index_folder import EXACT, FAISS, SERVERS
from qrag_jax.retrieval.server_index import ServerSettings
from qrag_jax.runtime import commandline, hosts
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.mesh import host_mesh
from qrag_jax.runtime.platform import enable_persistent_cache
from qrag_jax.runtime.whole_files import writing
from qrag_jax.systems import indexing, run_flags

OF_SETTINGS = ("dtype", "language", "skip_empty", "part", "workers")
# Flag → the engines that read it; flags of new indexes, and of encoders.
READ_BY = {
    **dict.fromkeys(("server", "collection", "server_settings", "replace"), SERVERS),
    **dict.fromkeys(("faiss", "faiss_search"), (FAISS,)),
    "language": BY_WORDS,
}
OF_BUILDING = dict.fromkeys(("corpus", "engine", "dtype", *READ_BY), ("a new index",))
OF_ENCODER = dict.fromkeys(
    ("chunk_prefix", "max_chunk_tokens", "pooling", "compute"), ("--encoder",)
)


def define_flags(argv: Sequence[str]) -> None:
    flags.DEFINE_string("corpus", None, "File or folder to index; none: go on with --index's own.")
    flags.DEFINE_string("index", None, "Folder to write, or to go on with.")
    flags.DEFINE_string("add", None, "File or folder of passages that a finished index gets.")
    flags.DEFINE_string("remove", None, "File of ids, one a line, that a finished index loses.")
    flags.DEFINE_string("encoder", None, "Folder of an export or an encoder, hub name, or minilm.")
    flags.DEFINE_enum("engine", EXACT, indexing.ENGINES, "What searches the index.")
    flags.DEFINE_string("faiss", "", "Factory string of faiss or file of an index; none: Flat.")
    flags.DEFINE_string("faiss_search", "", "Parameters of its search, such as nprobe=64.")
    flags.DEFINE_string("server", "", "With an engine on a server: its URL; none: 127.0.0.1.")
    flags.DEFINE_string("collection", "", "Likewise: the name there; none: passages.")
    flags.DEFINE_string("server_settings", "", "Likewise: such as shards=16,replicas=2,exact=true.")
    flags.DEFINE_bool("replace", False, "Likewise: delete another collection of this name.")
    flags.DEFINE_enum("dtype", "float32", [*indexing.DTYPES], "Of vectors; int8: bfloat16 on disk.")
    flags.DEFINE_string("columns", "", "Names of fields: id=NAME,title=NAME,text=NAME.")
    flags.DEFINE_string("metadata", ALL, "Further fields that are kept: names, or * for all.")
    flags.DEFINE_string("language", "english", "Of words: of stems and stop words; none.")
    flags.DEFINE_bool("skip_empty", False, "Leave out passages without any text; else an error.")
    flags.DEFINE_string("hosts", "", hosts.HELP)
    flags.DEFINE_integer("part", 0, "Passages written at a time, 0: as the devices need it.")
    flags.DEFINE_integer("workers", -1, "Processes that tokenise; 0: threads, -1: by the devices.")
    flags.DEFINE_string("chunk_prefix", "", "With --encoder: text before every passage.")
    flags.DEFINE_integer("max_chunk_tokens", 0, "With --encoder: longest row, 0: as its folder.")
    flags.DEFINE_enum("pooling", "", ["", *POOLINGS], "With --encoder: instead of its own.")
    flags.DEFINE_enum("compute", precision.AUTO, precision.NAMES, "With --encoder: the dtype.")
    if run_flags.argument(argv, "workdir") is not None:
        run_flags.define(argv, "index", plays=False)
    else:
        flags.DEFINE_string("workdir", None, "Folder of a trained run.")


def _settings() -> indexing.IndexSettings:
    values = flags.FLAGS
    engine = values.engine
    if not values["engine"].present:
        engine = FAISS if values.faiss else engine
    commandline.refuse_unread(READ_BY, engine, "--engine=")
    server = ServerSettings.parse(values.server_settings)
    named = {"collection": values.collection} if values.collection else {}
    plain: Any = {name: values[name].value for name in OF_SETTINGS}
    return indexing.IndexSettings(
        engine=engine,
        server=replace(server, url=values.server, replace=values.replace, **named),
        faiss=str(Path(values.faiss).expanduser()) if values.faiss else "",
        faiss_search=values.faiss_search,
        columns=Columns.parse(values.columns, values.metadata),
        **plain,
    )


def _encoder(engine: str, out: Path, changes: bool) -> indexing.PassageEncoder | None:
    values, finished = flags.FLAGS, indexing.vectors_are_finished(out)
    of_words = engine in BY_WORDS or (changes and not finished)
    if of_words and (values.workdir or values.encoder):
        raise InputError("--workdir and --encoder are for engines of vectors; leave them out.")
    needed = not of_words and (bool(values.add) if changes else engine == EXACT or not finished)
    if bool(values.workdir) == bool(values.encoder) and (needed or values.workdir):
        raise InputError("give one of --workdir=RUN and --encoder=FOLDER, which embeds passages.")
    if not values.encoder:  # a run has its own, which --config.FIELD=VALUE changes
        commandline.refuse_unread(OF_ENCODER, "--workdir")
    if values.workdir:
        run = systems.kind(values.config).saved(Path(values.workdir), values.config, host_mesh)
        return run.passages(run.trained(run.chosen(run_flags.given_checkpoint()))[0])
    if not values.encoder:
        return None
    enable_persistent_cache()
    how = {"dtype": values.compute, "pooling": values.pooling, "chunk_prefix": values.chunk_prefix}
    mesh, most = host_mesh((-1, 1, 1)), values.max_chunk_tokens
    return indexing.PassageEncoder.of_folder(values.encoder, EncoderConfig(**how), mesh, most)


def main() -> int:
    if not flags.FLAGS.index:
        raise InputError("give the folder to write, for example --index=indexes/wiki.")
    out = Path(flags.FLAGS.index).expanduser()
    files = (flags.FLAGS.corpus, flags.FLAGS.add, flags.FLAGS.remove)
    source, add, remove = (Path(file).expanduser() if file else None for file in files)
    if changes := bool(add or remove):
        commandline.refuse_unread(OF_BUILDING, "a change")
    with hosts.joined(flags.FLAGS.hosts), StopSignal() as stop:
        settings = _settings()
        with writing(out, "--index"):
            encoder = _encoder(settings.engine, out, changes)
            what: Any = {"add": add, "remove": remove, "settings": settings, "stop": stop}
            try:
                if changes:
                    indexed = indexing.change_index(out, encoder, **what)
                else:
                    indexed = indexing.index_corpus(source, out, encoder, settings, stop)
            except Stopped as stopped:
                print(f"{stopped}: stopped, what is finished is kept; give the same command again.")
                return 128 + (signal.Signals[stop.name] if stop.name else signal.SIGTERM)
        if jax.process_index() == 0:
            stored, folder, embedded, cut = indexed
            now = f", {embedded:,} embedded now" if embedded else ""
            print(f"{folder}: {len(stored):,} passages{now}")
            if encoder is not None and cut is not None:
                longer = f"are longer than {encoder.row_tokens} tokens and were cut"
                print(
                    f"{cut:,} of {'the new' if changes else f'{len(stored):,}'} passages {longer}"
                )
    return 0


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
