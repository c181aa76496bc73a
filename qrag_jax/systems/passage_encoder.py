"""The tower that embeds passages: of a run, of an export, or of any encoder's folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
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
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.models.files.model_folder import resolve_folder
from qrag_jax.models.files.sentence_transformers import (
    FLAGS,
    POOLING_NAMES,
    prompts,
    read_inputs,
)
from qrag_jax.models.files.weight_names import LeafPath, tensors_from_params
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.pretrained import LoadedEncoder, load_encoder
from qrag_jax.models.trunks.families import family_of
from qrag_jax.models.trunks.trunk import LAYERS
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.towers import TOWER_END, RowForm, State, Towers, tower_digest
from qrag_jax.rollouts.block_shapes import blocks_of
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.rollouts.text_table import Embed, MeshTower, make_embed
from qrag_jax.runtime import retriever_config
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import MINILM, find_minilm
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR, RetrieverConfig, passage_text

if TYPE_CHECKING:
    from qrag_jax.systems.saved_run import SavedRun

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
    family = family_of(loaded.model_config, "config.json")
    return scaled_norm(one, family.last_norm, encoder.scale / scale_outside(encoder))


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


# ---------------------------------------------------------------- rows


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
    form: RowForm
    title_separator: str = TITLE_SEPARATOR  # between title and text

    def of(self, numbers: Sequence[int] | np.ndarray) -> Rows:
        """The rows of the passages with these numbers."""
        passages = StoredCorpus(self.folder).passages(numbers)  # maps of files: as good as free
        texts = (passage_text(each.title, each.text, self.title_separator) for each in passages)
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
        made = iter(read_ahead(grain.MapDataset.source(pieces).map(self.of), workers))
        for group in groups:
            parts = [next(made) for _ in range(0, len(group), PIECE)]
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
    origin: str  # the folder that it comes from, for messages
    title_separator: str = TITLE_SEPARATOR  # between a passage's title and its text

    @classmethod
    def of_run(cls, run: SavedRun, params: Params | Adapted) -> PassageEncoder:
        """The tower of chunks of a run; passages are cut at `config.data.max_chunk_tokens`."""
        data, config, loaded = run.config.data, run.config.encoder, run.loaded
        most = min(data.max_chunk_tokens, loaded.encoder.max_positions)
        how = most, config, str(run.workdir), data.passage_separator
        return cls(run.mesh, params, run.shardings, loaded, *how)

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
        folder = _folder(path)
        loaded = load_encoder(folder, **config.load_settings | {"platform": Platform.of(mesh)})
        encoder = loaded.encoder
        if not encoder.chunk_prefix:
            own = own_prefix(loaded.tokenizer)
            encoder = dataclasses.replace(encoder, chunk_prefix=own)
            loaded = dataclasses.replace(loaded, encoder=encoder)
            if not own and (found := prompts(folder)):
                texts = ", ".join(f"{name} {text!r}" for name, text in found.items())
                print(f"The model's prompts are not used ({texts}); --chunk_prefix gives one.")
        longest = read_inputs(folder)[1] or USUAL_TOKENS
        row_tokens = max_tokens or min(longest, encoder.max_positions)
        least = max(len(encoder.chunk_opening), len(encoder.state_opening)) + 2
        if not least <= row_tokens <= encoder.max_positions:
            raise InputError(
                f"--max_chunk_tokens is {row_tokens}, but rows of {path} have {least} to "
                f"{encoder.max_positions} tokens, special ones included; give a number of these."
            )
        shardings = placement.params_shardings(mesh, loaded.trunk.partition_rules(), loaded.stored)
        params = placement.both_towers(shardings, loaded.stored)
        separator = TITLE_SEPARATOR
        if folder.name == EXPORTED and (folder.parent / retriever_config.NAME).is_file():
            separator = RetrieverConfig.read(folder.parent).title_separator
        return cls(mesh, params, shardings, loaded, row_tokens, config, str(folder), separator)

    @property
    def encoder(self) -> TextEncoder:
        """What computes it."""
        return self.loaded.encoder

    @property
    def tokenizer(self) -> TextTokenizer:
        """What makes its tokens."""
        return self.loaded.tokenizer

    def digest(self) -> str:
        """Tells vectors from others: `tower_digest`, `TOWER_END`, and how they are computed.

        Of a run and of its export the first part is the same. All hosts call this together.
        """
        encoder = self.encoder
        pooling, precision = POOLING_NAMES[encoder.pooling], encoder.module.precision
        tower = tower_digest(
            tensors_from_params(self.loaded.table, one_tower(self.loaded, CHUNK, self.params)),
            row_tokens=self.row_tokens,
            opening=encoder.chunk_opening,
            end=encoder.sep_id,
            pooling=[flag for flag, name in FLAGS.items() if name == pooling],
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
        config, counts = self.blocks, np.bincount(lengths, minlength=self.row_tokens + 1)
        how: Any = {"sizes": config.block_sizes, "tokens": config.block_tokens}
        how["platform"] = Platform.of(self.mesh)
        blocks = blocks_of(counts, config.length_buckets, **how)
        return make_embed(self.mesh, self.shardings, self.encoder, blocks, CHUNK)

    def cut(self, questions: Sequence[str]) -> list[int]:
        """The indices of the questions that have more tokens than a row."""
        return self.towers.cut(questions)

    def __call__(self, questions: Sequence[str]) -> np.ndarray:
        """float32 `[questions, width]`; questions that are too long are cut."""
        return self.towers.states([State(question) for question in questions])


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
