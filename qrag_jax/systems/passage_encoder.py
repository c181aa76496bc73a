"""The tower that embeds passages: of a run, of an export, or of any encoder's folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from qrag_jax.data.episodes import read_ahead
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.learners import placement
from qrag_jax.llm.text.extraction import well_formed
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.files.model_folder import resolve_folder
from qrag_jax.models.files.sentence_transformers import prompts, read_inputs
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exported import chunk_digest
from qrag_jax.rollouts.block_shapes import blocks_of
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.rollouts.text_table import Embed, MeshTower, make_embed
from qrag_jax.runtime import retriever_config
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.minilm import MINILM, find_minilm
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR, RetrieverConfig, passage_text

if TYPE_CHECKING:
    from qrag_jax.systems.saved_run import SavedRun

PIECE = 1024  # passages tokenised at a time


class Rows(NamedTuple):
    """Rows of tokens."""

    tokens: np.ndarray  # int32 `[total]`, all rows one after the other, special tokens included
    lengths: np.ndarray  # int32 `[rows]`
    cut: int  # number of passages that were longer than a row

    def each(self) -> list[np.ndarray]:
        """The rows, int32 `[length]` each."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclasses.dataclass(frozen=True)
class PassageRows:
    """Makes the rows of passages; the same in every thread and process."""

    folder: Path  # of the stored corpus
    tokenizer: TextTokenizer
    opening: tuple[int, ...]  # ids that every row begins with
    row_tokens: int  # length of the longest row, special tokens counted
    title_separator: str = TITLE_SEPARATOR  # between title and text

    def of(self, numbers: Sequence[int] | np.ndarray) -> Rows:
        """The rows of the passages with these numbers."""
        passages = StoredCorpus(self.folder).passages(numbers)  # maps of files: as good as free
        texts = (passage_text(each.title, each.text, self.title_separator) for each in passages)
        encoded = self.tokenizer.encode([well_formed(text) for text in texts])
        kept = self.row_tokens - len(self.opening) - 1
        end = [self.tokenizer.sep_id]
        tokens: list[int] = []
        for ids in encoded:
            tokens += [*self.opening, *ids[:kept], *end]
        lengths = [len(self.opening) + min(len(ids), kept) + 1 for ids in encoded]
        cut = sum(len(ids) > kept for ids in encoded)
        return Rows(np.array(tokens, np.int32), np.array(lengths, np.int32), cut)

    def ahead(self, groups: Sequence[range], workers: int) -> Iterator[Rows]:
        """The rows of each group of passages in order, a few thousand of them made ahead."""
        pieces = [
            group[start : start + PIECE]
            for group in groups
            for start in range(0, len(group), PIECE)
        ]
        made = iter(read_ahead(grain.MapDataset.source(pieces).map(self.of), workers))
        for group in groups:
            parts = [next(made) for _ in range(0, len(group), PIECE)]
            yield Rows(
                np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)]),
                np.concatenate([np.zeros(0, np.int32), *(part.lengths for part in parts)]),
                sum(part.cut for part in parts),
            )


EXPORTED = "chunk"  # folder of the tower of chunks in an export
USUAL_TOKENS = 512  # longest row of a model whose folder says nothing


@dataclasses.dataclass(frozen=True)
class PassageEncoder:
    """A tower on the devices of a mesh, and how its rows are made."""

    mesh: Mesh
    # The parameters of two towers stacked on axis 0, of which `CHUNK` is used; in an `Adapted`,
    # only the adapters are stacked
    params: Params | Adapted
    shardings: Params | Adapted  # where they live
    encoder: TextEncoder
    tokenizer: TextTokenizer
    row_tokens: int  # length of the longest row, special tokens counted; longer passages are cut
    # How rows are packed (block_tokens, length_buckets, block_sizes are read)
    blocks: EncoderConfig
    origin: str  # the folder that it comes from, for messages
    title_separator: str = TITLE_SEPARATOR  # between a passage's title and its text
    # Gives the digest of the exported tower that it is, of several hosts on all of them together;
    # None: it is none, or has other settings
    exported: Callable[[], str] | None = None

    @classmethod
    def of_run(cls, run: SavedRun, which: str = "best") -> PassageEncoder:
        """The tower of chunks of a run; passages are cut at `config.data.max_chunk_tokens`."""
        # This module is on the way to trainings, which need no model cards.
        from qrag_jax.systems.towers_export import run_chunk_digest

        loaded, params = run.loaded, run.trained(which)[0]
        return cls(
            run.mesh,
            params,
            run.shardings,
            loaded.encoder,
            loaded.tokenizer,
            min(run.config.data.max_chunk_tokens, loaded.encoder.max_positions),
            run.config.encoder,
            str(run.workdir),
            run.config.data.passage_separator,
            functools.partial(run_chunk_digest, run, params),
        )

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
            mesh: None: all devices, each with all parameters.
            max_tokens: of a row; 0: as the folder says, else `USUAL_TOKENS`.
        """
        config, mesh = config or EncoderConfig(), mesh or make_mesh()
        folder = _folder(path)
        settings = config.load_settings | {"platform": Platform.of(mesh)}
        loaded = load_encoder(folder, **settings)
        encoder = loaded.encoder
        if not encoder.chunk_prefix:
            own = own_prefix(loaded.tokenizer)
            encoder = dataclasses.replace(encoder, chunk_prefix=own)
            if not own and (found := prompts(folder)):
                texts = ", ".join(f"{name} {text!r}" for name, text in found.items())
                print(f"The model's prompts are not used ({texts}); --chunk_prefix gives one.")
        longest = read_inputs(folder).max_tokens or USUAL_TOKENS
        row_tokens = max_tokens or min(longest, encoder.max_positions)
        least = len(encoder.chunk_opening) + 2
        if not least <= row_tokens <= encoder.max_positions:
            raise InputError(
                f"--max_chunk_tokens is {row_tokens}, but rows of {path} have {least} to "
                f"{encoder.max_positions} tokens, special ones included; give a number of these."
            )
        shardings = placement.params_shardings(mesh, loaded.partition_rules, loaded.stored)
        params = placement.both_towers(shardings, loaded.stored)
        about = folder.parent / retriever_config.NAME
        exported = folder.name == EXPORTED and about.is_file()
        as_it_is = exported and not (config.pooling or config.chunk_prefix or max_tokens)
        return cls(
            mesh,
            params,
            shardings,
            encoder,
            loaded.tokenizer,
            row_tokens,
            config,
            str(folder),
            RetrieverConfig.read(folder.parent).title_separator if exported else TITLE_SEPARATOR,
            functools.partial(chunk_digest, folder) if as_it_is else None,
        )

    @property
    def made_by(self) -> dict[str, Any]:
        """All but the weights that a vector depends on."""
        encoder = self.encoder
        precision = encoder.module.precision
        usual = self.title_separator == TITLE_SEPARATOR
        return {
            **({} if usual else {"title_separator": self.title_separator}),
            "row_tokens": self.row_tokens,
            "tokenizer": self.tokenizer.fingerprint(),
            "scale": encoder.scale,
            "pooling": [encoder.pooling, encoder.normalise],
            "opening": list(encoder.chunk_opening),
            # Not the form of attention: it changes nothing but the order of sums.
            "precision": [str(precision.activations), str(precision.products)],
        }

    def digest(self) -> str:
        """A digest of the weights and of `made_by`; reads all weights, one array at a time."""
        if isinstance(self.params, Adapted):
            leaves = jax.tree.map(_Leaf, self.encoder.tower(self.params, CHUNK))
        else:  # the tower as a whole would be a copy on the devices
            leaves = jax.tree.map(lambda leaf: _Leaf(leaf, CHUNK), self.params)
        return encoder_key(leaves, self.made_by)

    def row(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The row of a passage's token ids, int32 `[at most row_tokens]`."""
        opening = self.encoder.chunk_opening
        kept = self.row_tokens - len(opening) - 1
        return np.array([*opening, *ids[:kept], self.encoder.sep_id], np.int32)

    def tower(self) -> MeshTower:
        """Embeds rows that come a few at a time, such as those of questions."""
        return MeshTower(
            self.mesh,
            self.shardings,
            self.encoder,
            self.params,
            number=CHUNK,
            row_tokens=self.row_tokens,
        )

    def embed(self, lengths: np.ndarray) -> Embed:
        """The jitted `(params, tokens [N, L], lengths [N]) → [N, D]`."""
        config = self.blocks
        blocks = blocks_of(
            np.bincount(lengths, minlength=self.row_tokens + 1),
            config.length_buckets,
            platform=Platform.of(self.mesh),
            sizes=config.block_sizes,
            tokens=config.block_tokens,
        )
        return make_embed(self.mesh, self.shardings, self.encoder, blocks, CHUNK)


def own_prefix(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer itself puts between the opening token and a text.

    An export's tokenizer does so with the tower's prefix.
    """
    ids = tokenizer.backend.encode("", add_special_tokens=True).ids
    opening = [] if tokenizer.cls_id is None else [tokenizer.cls_id]
    if ids[: len(opening)] != opening or ids[len(opening) :][-1:] != [tokenizer.sep_id]:
        return ()
    return tuple(ids[len(opening) : -1])


def _folder(path: str) -> Path:
    if path == MINILM:
        found = find_minilm()
        if found is None:
            raise InputError(f"--encoder is {MINILM!r}, which was found nowhere; give a folder.")
        return found
    folder = resolve_folder(path)
    exported = folder / EXPORTED
    return exported if (exported / "config.json").is_file() else folder


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array, or one tower's part of it, which is brought to the host when NumPy asks for it."""

    leaf: jax.Array
    tower: int | None = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        leaf = self.leaf if self.tower is None else self.leaf[self.tower]
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
