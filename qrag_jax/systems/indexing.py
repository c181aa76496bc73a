"""Embeds passages, builds an index of a corpus (stored, then embedded part by part), changes it.

A `PassageEncoder` is the tower of chunks of a run or of an export, or any encoder's folder. The
folder of an index has one part for the corpus and one for each engine over it:

    OUT/corpus       the passages (`retrieval.corpus`)
    OUT/source.json  which files they were read from
    OUT/exact        the vectors and their manifest, which is written last
    OUT/bm25         the index of words
    OUT/faiss, OUT/qdrant, OUT/milvus: further engines over the same vectors (`make_engine`)
    OUT/version-2/..., OUT/current: all of it after a change (`change_index`), and which one it is

The disk holds the corpus and the vectors, and nothing else that grows. What was killed goes on: the
corpus after its last passages that are known to be on disk, the vectors after their last finished
parts. With several hosts (`runtime.hosts`) the folder is on a disk that all of them see. The first
one stores the corpus, each embeds its share of the parts, and the first one writes the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from tqdm import tqdm

from qrag_jax.data.episodes import read_ahead
from qrag_jax.data.records import read_lines
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.learners.state import both_towers, params_shardings
from qrag_jax.llm.outcomes import well_formed
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.precision import AUTO
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.models.files import sentence_transformers
from qrag_jax.models.files.model_folder import resolve_folder
from qrag_jax.models.files.weight_names import LeafPath, tensors_from_params
from qrag_jax.models.first_encoder import EncoderConfig, load_encoder
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.models.trunks.transformer import LAYERS
from qrag_jax.retrieval import index_folder
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.building import (
    BY_WORDS,
    DTYPES,
    ENGINES,
    FURTHER,
    SOURCE,
    IndexSettings,
    index_words,
    make_engine,
    make_faiss,
    read_from,
    read_passages,
    store_corpus,
)
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.index_folder import BM25, CORPUS, EXACT, FAISS, NAME, SERVERS, read_manifest
from qrag_jax.retrieval.protocol import NONE, Passage
from qrag_jax.retrieval.towers import TOWER_END, RowForm, Towers, tower_digest
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.rollouts.text_table import Embed, MeshTower, blocks_of, make_embed, padded_rows
from qrag_jax.runtime import hosts, retriever_config, whole_files
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.mesh import make_mesh, shard_batch
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import MINILM, find_minilm
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR, RetrieverConfig, passage_text

PIECE = 1024  # passages tokenised at a time


# ---------------------------------------------------------------- a tower as its files have it


def one_tower(loaded: LoadedEncoder, number: int, params: Params | Adapted) -> Params:
    """One tower's float32 parameters as an export has them: adapters merged in, and scaled.

    All hosts call this together, with the parameters of both towers.
    """
    encoder = loaded.encoder
    if isinstance(params, Adapted):
        adapted = Adapted(loaded.params, on_host(params.adapters, number))
        one = folded(adapted, encoder.lora_scale)
    else:
        one = on_host(params, number)
    last_norm = loaded.trunk.config.last_norm
    return scaled_norm(one, last_norm, encoder.scale / scale_outside(encoder))


def on_host(stacked: Params, number: int) -> Params:
    """One tower of both as float32 NumPy arrays; all hosts call this together."""

    def gathered(leaf: Any) -> np.ndarray:
        part = leaf[number]
        if isinstance(part, jax.Array) and not part.is_fully_addressable:
            part = multihost_utils.process_allgather(part, tiled=True)
        return np.asarray(part, np.float32)

    return jax.tree.map(gathered, stacked)


def scale_outside(encoder: TextEncoder) -> float:
    """The factor on the vectors that an exported tower's weights cannot hold; 1: there is none."""
    return encoder.scale if encoder.normalise else 1.0


def scaled_norm(params: Params, norm: LeafPath, factor: float) -> Params:
    """One tower's parameters with its last norm, and so all hidden states, times a factor.

    Of a norm in the layers, only the last layer's is multiplied. What is given stays as it is.
    """
    *in_layers, name = norm
    tree = params[LAYERS] if in_layers else params
    scaled = jax.tree.map(np.array, tree[name])  # copies
    for leaf in scaled.values():
        (leaf[-1] if in_layers else leaf)[...] *= np.float32(factor)
    tree = tree | {name: scaled}
    return params | {LAYERS: tree} if in_layers else tree


class Rows(NamedTuple):
    tokens: np.ndarray  # int32 `[total]`, all rows one after the other, special tokens included
    lengths: np.ndarray  # int32 `[rows]`
    cut: int  # number of passages that were longer than a row


@dataclasses.dataclass(frozen=True)
class PassageRows:
    """Makes the rows of passages; the same in every thread and process."""

    folder: Path  # of the stored corpus
    tokenizer: TextTokenizer
    form: RowForm
    title_separator: str = TITLE_SEPARATOR  # between title and text

    def of(self, numbers: Sequence[int] | np.ndarray) -> Rows:
        passages = StoredCorpus(self.folder).passages(numbers)  # maps of files: as good as free
        texts = (passage_text(p.title, p.text, self.title_separator) for p in passages)
        encoded = self.tokenizer.encode([well_formed(text) for text in texts])
        rows = [self.form.chunk(ids) for ids in encoded]
        tokens = np.fromiter(itertools.chain.from_iterable(rows), np.int32)
        others = len(self.form.chunk_opening) + 1
        cut = sum(len(ids) + others > len(row) for ids, row in zip(encoded, rows, strict=True))
        return Rows(tokens, np.array([len(row) for row in rows], np.int32), cut)

    def ahead(self, groups: Sequence[range], workers: int) -> Iterator[Rows]:
        """The rows of each group of passages in order, a few thousand of them made ahead."""
        pieces = [
            group[start : start + PIECE]
            for group in groups
            for start in range(0, len(group), PIECE)
        ]
        rows = iter(read_ahead(grain.MapDataset.source(pieces).map(self.of), workers))
        for group in groups:
            parts = [next(rows) for _ in range(0, len(group), PIECE)]
            tokens, lengths, cut = zip(self.of(()), *parts, strict=True)
            yield Rows(np.concatenate(tokens), np.concatenate(lengths), sum(cut))


EXPORTED = "chunk"  # folder of the tower of chunks in an export
USUAL_TOKENS = 512  # longest row of a model whose folder says nothing


@dataclasses.dataclass(frozen=True)
class PassageEncoder:
    """A tower on the devices of a mesh, and how its rows are made.

    It is a `retrieval.multi_step.QuestionEncoder`, too, for encoders that embed both.
    """

    mesh: Mesh
    # Of two towers stacked on axis 0, of which `CHUNK` is used; in an `Adapted`, of the adapters
    params: Params | Adapted
    shardings: Params | Adapted  # where they live
    loaded: LoadedEncoder
    row_tokens: int  # length of the longest row, special tokens counted; longer passages are cut
    # How rows are packed (block_tokens, length_buckets, block_sizes are read)
    blocks: EncoderConfig
    title_separator: str = TITLE_SEPARATOR  # between a passage's title and its text

    @classmethod
    def of_folder(
        cls,
        path: str,
        config: EncoderConfig | None = None,
        mesh: Mesh | None = None,
        max_tokens: int = 0,
    ) -> PassageEncoder:
        """The tower of chunks of an export, or a published encoder, which embeds queries as well.

        Args:
            path: a folder, a hub name, or "minilm".
            config: how it computes; `chunk_prefix` precedes passages, if the folder's tokenizer
                does not add a prefix by itself. Its `path` is not read.
            max_tokens: of a row; 0: as the folder says, else `USUAL_TOKENS`.
        """
        config, mesh = config or EncoderConfig(), mesh or make_mesh()
        folder = find_minilm() if path == MINILM else resolve_folder(path)
        if folder is None:
            raise InputError(f"--encoder is {MINILM!r}, which was found nowhere; give a folder.")
        if (folder / EXPORTED / "config.json").is_file():
            folder /= EXPORTED
        loaded = load_encoder(folder, config, platform=Platform.of(mesh))
        encoder = loaded.encoder
        if not config.chunk_prefix:
            prefix = own_prefix(loaded.tokenizer)
            opening = (*encoder.chunk_opening, *prefix)
            encoder = dataclasses.replace(encoder, chunk_opening=opening)
            loaded = dataclasses.replace(loaded, encoder=encoder)
            if not prefix:
                sentence_transformers.print_unused_prompts(folder, "--chunk_prefix gives one")
        longest = sentence_transformers.read_inputs(folder)[1] or USUAL_TOKENS
        row_tokens = max_tokens or min(longest, encoder.max_positions)
        least = max(len(encoder.chunk_opening), len(encoder.state_opening)) + 2
        if not least <= row_tokens <= encoder.max_positions:
            raise InputError(
                f"--max_chunk_tokens is {row_tokens}, but rows of {path} have {least} to "
                f"{encoder.max_positions} tokens, special ones included; give a number of these."
            )
        shardings = params_shardings(mesh, loaded.trunk.partition_rules(), loaded.stored)
        params = both_towers(shardings, loaded.stored)
        separator = TITLE_SEPARATOR
        if folder.name == EXPORTED and (folder.parent / retriever_config.NAME).is_file():
            separator = RetrieverConfig.read(folder.parent).title_separator
        return cls(mesh, params, shardings, loaded, row_tokens, config, separator)

    @property
    def encoder(self) -> TextEncoder:
        return self.loaded.encoder

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.loaded.tokenizer

    def digest(self) -> str:
        """Tells vectors from others: `tower_digest`, `TOWER_END`, and how they are computed.

        Of a run and of its export the first part is the same. All hosts call this together.
        """
        encoder = self.encoder
        pooling = sentence_transformers.POOLING_NAMES[encoder.pooling]
        precision = encoder.module.precision
        tower = tower_digest(
            tensors_from_params(self.loaded.table, one_tower(self.loaded, CHUNK, self.params)),
            row_tokens=self.row_tokens,
            opening=encoder.chunk_opening,
            end=encoder.sep_id,
            pooling=[flag for flag, name in sentence_transformers.FLAGS.items() if name == pooling],
            normalise=encoder.normalise,
            scale=scale_outside(encoder),
            title_separator=self.title_separator,
        )
        # Not the form of attention: it changes nothing but the order of sums.
        computed = [str(precision.activations), str(precision.products)]
        further = json.dumps([self.tokenizer.fingerprint(), *computed])
        return f"{tower}{TOWER_END}{hashlib.sha256(further.encode()).hexdigest()[:16]}"

    @functools.cached_property
    def form(self) -> RowForm:
        """How rows are composed; a question is a state without chunks."""
        encoder, most = self.encoder, self.row_tokens
        openings = encoder.state_opening, encoder.chunk_opening
        return RowForm(*openings, encoder.sep_id, most, 0, most, most, max_chunks=0)

    @functools.cached_property
    def towers(self) -> Towers:
        """Embeds a few texts at a time, such as questions."""
        how: Any = {"number": CHUNK, "row_tokens": self.row_tokens}
        tower = MeshTower(self.mesh, self.shardings, self.encoder, self.params, **how)
        return Towers(self.tokenizer, self.form, tower, tower)

    def embed(self, lengths: np.ndarray) -> Embed:
        """The jitted `(params, tokens [N, L], lengths [N]) → [N, D]`."""
        counts = np.bincount(lengths, minlength=self.row_tokens + 1)
        blocks = blocks_of(self.blocks, counts, Platform.of(self.mesh))
        return make_embed(self.mesh, self.shardings, self.encoder, blocks, CHUNK)

    def cut(self, questions: Sequence[str]) -> list[int]:
        """The indices of the questions that have more tokens than a row."""
        return self.towers.cut(questions)

    def __call__(self, questions: Sequence[str]) -> np.ndarray:
        """float32 `[questions, width]`; questions that are too long are cut."""
        return self.towers.states([(question, ()) for question in questions])


def own_prefix(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text, as an export's does with its prefix."""
    ids = tokenizer.backend.encode("", add_special_tokens=True).ids
    opening = [] if tokenizer.cls_id is None else [tokenizer.cls_id]
    if ids[: len(opening)] != opening or ids[len(opening) :][-1:] != [tokenizer.sep_id]:
        return ()
    return tuple(ids[len(opening) : -1])


def exported_towers(
    folder: Path, config: RetrieverConfig, form: RowForm, dtype: str
) -> Iterator[MeshTower]:
    """The towers of states and of chunks of an export, on all devices of this process."""
    mesh, how = make_mesh(), EncoderConfig(dtype=dtype or AUTO)
    state, chunk = (
        load_encoder(folder / tower.folder, how, platform=Platform.of(mesh))
        for tower in (config.state, config.chunk)
    )
    shardings = params_shardings(mesh, state.trunk.partition_rules(), state.stored)
    params = both_towers(shardings, state.stored, chunk.stored)
    return mesh_towers(mesh, shardings, [state.encoder, chunk.encoder], params, form)


def mesh_towers(
    mesh: Mesh,
    shardings: Any,
    encoders: Sequence[TextEncoder],
    params: Params | Adapted,
    form: RowForm,
    *,
    blocks: Sequence[Blocks | None] = (None, None),
) -> Iterator[MeshTower]:
    """The towers of states and of chunks, whose parameters are stacked; `blocks`: see MeshTower."""
    for number, tokens in ((STATE, form.state_tokens), (CHUNK, form.chunk_tokens)):
        how: Any = {"number": number, "row_tokens": tokens, "blocks": blocks[number]}
        yield MeshTower(mesh, shardings, encoders[number], params, **how)


# ---------------------------------------------------------------- an index is built

# Passages of a part, which are lost if the process is killed: seconds of work.
CPU_PART, ACCELERATOR_PART = 1024, 16_384
_PART_TOKENS = 2**27  # of a part, all rows as long as the longest: 0.5 GB
_TYPICAL = 2048  # passages by whose lengths blocks are chosen


class Indexed(NamedTuple):
    """A finished index, and what this call embedded."""

    corpus: StoredCorpus
    folder: Path  # of the engine, which holds the manifest
    embedded: int = 0  # passages
    cut: int | None = None  # passages longer than a row, of all; None: it was finished before


def index_corpus(
    source: Path | None,
    out: Path,
    encoder: PassageEncoder | None,
    settings: IndexSettings | None = None,
    stop: StopSignal | None = None,
) -> Indexed:
    """Builds an index, or goes on with one that was begun.

    A finished index of the same corpus and encoder is returned as it is. All hosts call this.

    Args:
        source: file or folder of the corpus (see `corpora.corpus_files`); None: `out` has one.
        encoder: of the passages; None: the engine needs none, or the vectors are finished.
    """
    settings, stop = settings or IndexSettings(), stop or StopSignal()
    whole, out = out, index_folder.version(out)
    by_words = settings.engine in BY_WORDS
    if not by_words and encoder is None and not vectors_are_finished(out):
        raise InputError(f"the engine {settings.engine} compares vectors; give an encoder.")
    with locked(whole):

        def store() -> None:
            if source is not None:
                about = read_from(source, settings)
                store_corpus(lambda: read_passages(source, settings), about, out / SOURCE, stop)

        hosts.first_does(store)
        stored = StoredCorpus(out / CORPUS)
        if settings.engine == BM25:
            index_words(stored, out / BM25, settings)
            return Indexed(stored, out / BM25)
        indexed = Indexed(stored, out / EXACT)
        if encoder is not None and not by_words:
            indexed = _index_vectors(stored, out / EXACT, encoder, settings, stop)
        if settings.engine in FURTHER:
            hosts.first_does(lambda: make_engine(out, stored, settings, stop))
        return indexed._replace(folder=out / settings.engine)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keeps other processes from writing an index; the first host cleans up what one had left."""
    if jax.process_index() > 0:
        yield
        return
    with whole_files.file_lock(out / whole_files.LOCK, out, "--index"):
        whole_files.clean_unfinished(out)
        yield


def vectors_are_finished(out: Path) -> bool:
    """Whether an index's folder has all vectors, so that no encoder is needed."""
    return (index_folder.version(out) / EXACT / index_folder.NAME).exists()


def _index_vectors(
    stored: StoredCorpus,
    folder: Path,
    encoder: PassageEncoder,
    settings: IndexSettings,
    stop: StopSignal,
) -> Indexed:
    dtype, storage = DTYPES[settings.dtype]
    of_all: Any = {"engine": EXACT, "corpus": stored.digest, "count": len(stored)}
    of_all["encoder"] = encoder.digest()
    how: Any = {"width": encoder.encoder.width, "settings": {"storage": storage}}
    about = index_folder.Manifest(**of_all, dtype=dtype, **how)
    parts = parts_of(folder, about, encoder, settings)
    if (folder / index_folder.NAME).exists():
        saved = index_folder.read_manifest(folder, **of_all)
        if saved.dtype != dtype:
            raise InputError(
                f"{folder / index_folder.NAME} has {saved.dtype!r} in the field dtype, but --dtype "
                f"is {settings.dtype}; give another --index, or delete {folder} to embed again."
            )
        if jax.process_index() == 0:
            parts.tidy()
            if saved.settings != about.settings:
                changed = dataclasses.replace(saved, settings=about.settings)
                index_folder.write_manifest(folder, changed)
        return Indexed(stored, folder)
    return embed_parts(stored, encoder, parts, settings, stop)


def parts_of(
    folder: Path,
    about: index_folder.Manifest,
    encoder: PassageEncoder | None,
    settings: IndexSettings,
    first: int = 0,
) -> index_folder.VectorParts:
    """The vectors of an index, in parts as the devices need them; `encoder` None: there is none."""
    part = settings.part or 1
    if encoder is not None and not settings.part:
        most = CPU_PART if Platform.of(encoder.mesh).on_cpu else ACCELERATOR_PART
        part = min(most, _PART_TOKENS // encoder.row_tokens)
    return index_folder.VectorParts(folder, about, part, first)


def embed_parts(
    stored: StoredCorpus,
    encoder: PassageEncoder | None,
    parts: index_folder.VectorParts,
    settings: IndexSettings,
    stop: StopSignal,
    *,
    there: Iterable[np.ndarray] = (),
) -> Indexed:
    """Embeds the parts that are not finished, and then makes their folder an index.

    `there`: see `VectorParts.begin`. `encoder` is None where there are no parts.
    """
    folder = parts.folder

    def begin() -> None:
        whole_files.clean_unfinished(folder)
        parts.begin(there)

    hosts.first_does(begin)
    numbers = list[int]()
    if encoder is not None:
        on_cpu = Platform.of(encoder.mesh).on_cpu
        workers = settings.workers if settings.workers >= 0 else (0 if on_cpu else 4)
        numbers = _embed(encoder, stored, parts, workers, stop)
    cut = parts.finished()
    hosts.together("the parts are counted")  # what finishes them deletes the notes
    if len(cut) < len(parts.numbers):
        raise Stopped(stop.name or "another host's signal")
    if jax.process_index() == 0:
        parts.finish()
    hosts.together("the index is finished")
    embedded = sum(len(parts.passages(number)) for number in numbers)
    return Indexed(stored, folder, embedded, sum(cut.values()))


def _embed(
    encoder: PassageEncoder,
    stored: StoredCorpus,
    parts: index_folder.VectorParts,
    workers: int,
    stop: StopSignal,
) -> list[int]:
    """Embeds the parts that are not finished, one of each host at a time; gives these."""
    total, host, count = len(stored), jax.process_index(), jax.process_count()
    how: Any = encoder.tokenizer, encoder.form, encoder.title_separator
    rows = PassageRows(stored.folder, *how)
    finished = set(parts.finished())
    # Where hosts compute together the vectors of a part depend on the other parts of its round.
    together = encoder.mesh.is_multi_process
    numbers = [number for number in parts.numbers if together or number not in finished]
    rounds = [numbers[start : start + count] for start in range(0, len(numbers), count)]
    rounds = [group for group in rounds if not finished.issuperset(group)]
    # A part beyond the last one has no passages.
    mine = [group[host] if host < len(group) else len(parts.numbers) for group in rounds]
    sizes = [sum(len(parts.passages(number)) for number in group) for group in rounds]
    typical = np.linspace(0, total - 1, min(total, _TYPICAL)).astype(np.int64)
    embed = encoder.embed(rows.of(typical).lengths)
    shape = (min(parts.part, total), encoder.row_tokens)

    def write(number: int, part: Rows, size: int, result: jax.Array) -> None:
        vectors = hosts.rows_here(result)[: len(part.lengths)]  # waits for it
        if number in parts.numbers:
            parts.write(number, vectors, part.cut)
        bar.update(size)

    devices, pad = encoder.mesh.local_mesh.size, encoder.encoder.pad_id
    tokenised = rows.ahead([parts.passages(number) for number in mine], workers)
    how = {"unit": " passages", "unit_scale": True, "disable": host > 0}
    with tqdm(total=total, initial=total - sum(sizes), **how) as bar:
        computed: Any = None  # the device computes a part while the host writes the one before
        for number, part, size in zip(mine, tokenised, sizes, strict=True):
            row_ids = np.split(part.tokens, np.cumsum(part.lengths)[:-1])  # of none, an empty one
            batch = padded_rows(row_ids, shape, devices, pad)
            result = embed(encoder.params, *shard_batch(encoder.mesh, batch))
            if computed is not None:
                write(*computed)
            computed = number, part, size, result
            if hosts.any_of(stop.requested):
                break
        if computed is not None:
            write(*computed)
    hosts.together("all parts are written")
    return [number for group in rounds for number in group]


# ---------------------------------------------------------------- an index is changed
# The new version (`index_folder.version`) is what an index would be that is built of its passages:
# those that are kept, in their order, then those that are added. Only these are embedded; the
# vectors of the others are copied. Words are indexed again, because every passage changes the
# weights of all. Until the new version is whole, the index is the old one.

CHANGE = "change.json"  # in the folder of a version: what was added and removed
_COPIED = 2**24  # numbers of vectors that are copied at a time


def change_index(
    out: Path,
    encoder: PassageEncoder | None,
    *,
    add: Path | None = None,
    remove: Path | None = None,
    settings: IndexSettings | None = None,
    stop: StopSignal | None = None,
) -> Indexed:
    """Changes a finished index, or goes on with that; all hosts call this, and see the files.

    Its engines are those of the old version, but servers, whose collections are of the old one.

    Args:
        encoder: the one that embedded the index; None: it has no vectors, or nothing is added.
        add: file or folder of passages, which are read by `settings`.
        remove: file with one id a line; a passage may be removed and added again.
    """
    settings, stop = settings or IndexSettings(), stop or StopSignal()
    with locked(out):
        old = index_folder.version(out)
        stored = StoredCorpus(old / CORPUS)
        names = sorted({name for _, name in read_lines(remove)}) if remove else []
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
        about = {"of": stored.digest, "removed": digest, **read_from(add, settings)}
        if (old / CHANGE).exists():
            last = json.loads((old / CHANGE).read_text(encoding="utf-8"))
            if last == about | {"of": last["of"]}:  # it was finished, and is given again
                return Indexed(stored, old)
        there = {
            engine: read_manifest(old / engine, corpus=stored.digest)
            for engine in ENGINES
            if (old / engine).is_dir()
        }
        encoder = encoder if add else None
        embedded_by = encoder.digest() if encoder else ""
        if EXACT in there and add and embedded_by != there[EXACT].encoder:
            raise InputError(
                f"{out} was embedded by another encoder, or with another dtype, pooling, prefix or "
                "length, than those given; give the ones that it was built with."
            )
        removed = stored.numbers(names)
        if NONE in removed:
            unknown = names[removed.tolist().index(NONE)]
            raise InputError(f"{remove}: {unknown!r} is no id of {out}; leave it out.")
        kept = np.delete(np.arange(len(stored)), removed)

        def read() -> Iterator[tuple[str, Passage | None]]:
            for number in kept.tolist():
                yield f"{out}, passage {number}", stored.passages([number])[0]
            if add is not None:
                yield from read_passages(add, settings)

        new = index_folder.next_version(out)

        def store() -> None:
            index_folder.delete_others(out)
            whole_files.clean_unfinished(new)
            store_corpus(read, about, new / CHANGE, stop)

        hosts.first_does(store)
        indexed = Indexed(StoredCorpus(new / CORPUS), new)
        if EXACT in there and not (new / EXACT / NAME).exists():
            manifest, vectors = index_folder.open_vectors(old / EXACT)
            size = max(_COPIED // manifest.width, 1)
            copied = (vectors[kept[i : i + size]] for i in range(0, len(kept), size))
            now: Any = {"corpus": indexed.corpus.digest, "count": len(indexed.corpus)}
            manifest = dataclasses.replace(manifest, files={}, **now)
            parts = parts_of(new / EXACT, manifest, encoder, settings, first=len(kept))
            indexed = embed_parts(indexed.corpus, encoder, parts, settings, stop, there=copied)

        def finish() -> None:
            if BM25 in there and not (new / BM25 / NAME).exists():
                config = BM25Config(**there[BM25].settings["words"])
                BM25Index.build(indexed.corpus, config).save(new / BM25)
            if FAISS in there and not (new / FAISS / NAME).exists():
                from qrag_jax.retrieval.faiss_index import FILE

                how = there[FAISS].settings
                grown = old / FAISS / FILE if not names else how["made_as"]
                if EXACT in there and grown:
                    make_faiss(new, indexed.corpus, grown, how["made_as"], how["search"])
                else:
                    print("the index of faiss is left out: give it again with qrag index --faiss")
            for engine in there.keys() & {*SERVERS}:
                kept_at = there[engine].settings["server"]["collection"]
                print(
                    f"the collection {kept_at} of {engine} has the old passages: send the new ones "
                    f"to another, with qrag index --engine={engine} --server=URL --collection=NAME"
                )
            index_folder.switch(out, new)
            added = len(indexed.corpus) - len(kept)
            print(f"{added:,} passages were added to {out}, {len(stored) - len(kept):,} removed")

        hosts.first_does(finish)
        return indexed._replace(folder=new)
