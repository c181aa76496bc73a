"""Section `encoder` of a config, folders of encoders, and the encoder that a run starts from.

The latter is kept in the run's folder, so that a run is self-contained. It may be a small BERT from
scratch, with a WordPiece tokenizer trained on the run's texts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

import jax
import numpy as np
from tokenizers.implementations import BertWordPieceTokenizer

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import Count, InputError, Natural, Positive, least, one_of
from qrag_jax.models import pretrained
from qrag_jax.models.compute.precision import AUTO, FLOAT32, NAMES
from qrag_jax.models.embedding import LAST, MEAN, POOLINGS, TextEncoder
from qrag_jax.models.files import sentence_transformers
from qrag_jax.models.files.model_folder import read_config, resolve_folder, trunk_folder
from qrag_jax.models.files.weight_names import save_folder
from qrag_jax.models.pretrained import Dropped, LoadedEncoder, LoraConfig
from qrag_jax.models.trunks.families import BERT_TABLE, FAMILIES, BertConfig
from qrag_jax.models.trunks.transformer import REMAT_POLICIES, Transformer
from qrag_jax.runtime import hosts, retriever_config
from qrag_jax.runtime.config_fields import check, check_value
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import HUB_NAME, MINILM, MINILM_OR_SCRATCH, find_minilm
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.whole_files import whole_folder, write_json

FOLDER = "encoder"  # in the run's folder
SECOND = "chunk"  # folder of the tower of chunks, in the encoder's, if it starts from another
_WORDS_OF_MINILM = 30_522  # in its vocabulary; an encoder from scratch has fewer
# Fields that a config may leave to the model's folder, with the values that mean so. When a run
# begins, the folder's settings are saved in the run's config. The run never asks the folder again.
LEFT_OPEN: dict[str, Any] = {"pooling": "", "normalise": None, "scale": None}
UNNORMALISED_SCALE = 0.1  # Q-RAG divides the mean of BERT's hidden states by 10
# MiniLM was published with normalised vectors. Here its vectors are made as in Q-RAG's BERT towers.
OF_MINILM: dict[str, Any] = {"pooling": MEAN, "normalise": False, "scale": UNNORMALISED_SCALE}


@dataclasses.dataclass(frozen=True)
class ScratchConfig:
    """Section `encoder.scratch`: sizes of the encoder."""

    layers: Count = 2  # transformer layers
    hidden: Annotated[int, least(2)] = 128  # 2D, width of an embedding
    heads: Count = 4  # attention heads
    vocab: Count = 8000  # most word pieces in the vocabulary
    positions: Annotated[int, least(3)] = 512  # longest row, in tokens


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Section `encoder`."""

    path: str = "facebook/contriever"  # folder, hub name, "minilm", or "": from scratch
    # of the computation: float32, bfloat16; auto: the faster one here
    dtype: Annotated[str, one_of(NAMES)] = AUTO
    # float32, bfloat16; auto: as dtype, but float32 on CPU
    activations: Annotated[str, one_of(NAMES)] = AUTO
    # recomputed for gradients: none, layers, dots (all but dot products)
    remat: Annotated[str, one_of(REMAT_POLICIES)] = "none"
    # How a row's hidden states become a vector. "" and None: as the model's folder says; "minilm"
    # and folders that say nothing: the mean times 0.1 as in Q-RAG (Qwen3: last, normalised).
    pooling: Annotated[str, one_of(("", *POOLINGS))] = ""  # mean, last, cls
    normalise: bool | None = None  # scale the pooled vector to length 1
    scale: float | None = None  # factor on the vector; None: 1 if normalised, else 0.1
    state_prefix: str = ""  # text that states begin with, such as "query: "
    chunk_prefix: str = ""  # text that chunks begin with, such as "passage: "
    # Shares that the trunk drops in training, in online and target towers (Q-RAG: 0.1).
    dropout: Dropped = 0.0  # of hidden states: embeddings, outputs of attention and feed-forward
    attention_dropout: Dropped | None = None  # of attention weights; None: the same as dropout
    length_buckets: Count = 3  # number of row lengths that attention is compiled for
    block_tokens: Natural = 0  # tokens computed at a time; 0: 512 on CPU, else 8192
    block_sizes: Count = 2  # number of block sizes compiled, each half of the next
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    scratch: ScratchConfig = dataclasses.field(default_factory=ScratchConfig)  # if path is ""

    def __post_init__(self) -> None:
        if self.lora.dropout and not self.lora.rank:
            raise InputError("config.encoder.lora.dropout needs config.encoder.lora.rank.")
        if (self.dropout or self.of_attention) and self.lora.rank:
            raise InputError(
                f"config.encoder.dropout is {self.dropout}, attention_dropout {self.of_attention}; "
                "with adapters the encoder drops nothing: set config.encoder.lora.dropout instead."
            )

    @property
    def of_attention(self) -> float:
        """The share of attention weights that the trunk drops in training."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    def settled(self) -> Self:
        """The settings, with those that "minilm" leaves open."""
        if self.path not in (MINILM, MINILM_OR_SCRATCH):
            return self
        left = {n: v for n, v in OF_MINILM.items() if getattr(self, n) == LEFT_OPEN[n]}
        return dataclasses.replace(self, **left)


# ---------------------------------------------------------------------- folders of encoders


def load_encoder(
    folder: Path, config: EncoderConfig | None = None, *, platform: Platform | None = None
) -> LoadedEncoder:
    """Reads the folder of an encoder.

    Args:
        config: how it computes (None: by the defaults, in float32); its `path` is not read. A scale
            that it leaves open is the one of config.json (`VECTOR_SCALE`, as in exported towers),
            else 1 for normalised vectors and 0.1 for others. Pooling and normalisation are then
            those of the model's sentence-transformers files, else of its family; if both are given,
            the files are not read.
        platform: the devices that compute; None: those of this process.
    """
    config = (config or EncoderConfig(dtype=FLOAT32)).settled()
    check(config, "config.encoder.")
    pooling, normalise, scale = config.pooling, config.normalise, config.scale
    root, folder = folder, trunk_folder(folder)
    fields = pretrained.load_fields(folder, FAMILIES, config, platform)
    trunk, where = fields["trunk"], str(folder / "config.json")
    sizes, is_causal = trunk.config, trunk.config.CAUSAL
    if (config.dropout or config.of_attention) and is_causal:
        raise InputError(
            f"config.encoder.dropout is {config.dropout}, attention_dropout {config.of_attention}, "
            f"and models of the type {fields['table'].model_type!r} have no dropout; set both to 0."
        )
    if sizes.hidden_size % 2:
        raise InputError(f"{where}: hidden_size is {sizes.hidden_size}; it must be even.")
    lowers, _ = sentence_transformers.read_inputs(root)
    tokenizer = TextTokenizer.load(folder, opens_rows=not is_causal, lowers=lowers)
    pretrained.check_vocabulary(folder, tokenizer.vocab_size, sizes.vocab_size)
    own_pooling = None
    if not pooling or normalise is None:
        own_pooling, is_normalised = sentence_transformers.read_published(root) or (None, is_causal)
        normalise = is_normalised if normalise is None else normalise
    if scale is None:
        scale = fields["model_config"].get(sentence_transformers.VECTOR_SCALE)
        if scale is not None:
            check_value(Positive, scale, f"{where}: {sentence_transformers.VECTOR_SCALE}")
        scale = float(scale or (1.0 if normalise else UNNORMALISED_SCALE))
    opening = () if tokenizer.cls_id is None else (tokenizer.cls_id,)
    state_ids, chunk_ids = tokenizer.encode([config.state_prefix, config.chunk_prefix])
    encoder = TextEncoder(
        module=trunk,
        width=sizes.hidden_size,
        max_positions=sizes.longest_row,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.pad_id,
        scale=scale,
        pooling=pooling or own_pooling or (LAST if is_causal else MEAN),
        normalise=normalise,
        state_opening=(*opening, *state_ids),
        chunk_opening=(*opening, *chunk_ids),
        dropout=config.dropout,
        attention_dropout=config.of_attention,
    )
    return LoadedEncoder(encoder=encoder, tokenizer=tokenizer, **fields)


def save_encoder(loaded: LoadedEncoder, tokenizer_files_from: Path, out: Path) -> None:
    """Writes the folder of an encoder; weights keep the bytes that they have in their files."""
    save_folder(loaded.table, loaded.stored, loaded.model_config, tokenizer_files_from, out)


def with_new_adapters(loaded: LoadedEncoder, config: LoraConfig, seed: int) -> LoadedEncoder:
    """The encoder, frozen, with new adapters that change no output yet."""
    adapters = pretrained.new_adapters(loaded.table, loaded.trunk, config, seed)
    how: Any = {"lora_scale": config.scale, "lora_dropout": config.dropout}
    encoder = dataclasses.replace(loaded.encoder, **how)
    return dataclasses.replace(loaded, encoder=encoder, adapters=adapters)


# ---------------------------------------------------------------------- the first encoder


def check_origin(config: EncoderConfig) -> None:
    """Refuses a pretrained encoder that cannot be found, before the data are read."""
    if config.path not in ("", MINILM, MINILM_OR_SCRATCH):
        for folder in _towers(resolve_folder(config.path), config):
            read_config(folder)


def prepare_encoder(
    config: EncoderConfig,
    workdir: Path,
    texts: Iterable[str],
    seed: int,
    *,
    is_kept: bool,
    platform: Platform | None = None,
) -> LoadedEncoder:
    """The encoder that the run in `workdir` starts from; it is kept in the run's folder.

    `config.path` is a folder, a hub name, "minilm" (see `find_minilm`), "minilm-or-scratch", or
    "" for a small encoder from scratch, whose tokenizer is trained on `texts`. The folder may be an
    export, from whose two towers the two of the run start.

    Args:
        seed: of random weights and new adapters.
        is_kept: whether the run has begun; an encoder in its folder is then used as it is.
    """
    folder = workdir / FOLDER

    def build() -> None:
        if not is_kept or not folder.exists():
            _build(config, folder, texts, seed, platform)

    hosts.first_does(build)
    loaded = load_encoder(folder, config, platform=platform)  # weights are read lazily, from there
    if (folder / SECOND).exists():
        second = load_encoder(folder / SECOND, config, platform=platform).stored
        loaded = dataclasses.replace(loaded, second=second)
    return with_new_adapters(loaded, config.lora, seed) if config.lora.rank else loaded


def _build(
    config: EncoderConfig, folder: Path, texts: Iterable[str], seed: int, platform: Platform | None
) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by a start that was refused: never trained
    with whole_folder(folder) as building:
        origin = _pretrained_folder(config.path)
        if origin is None:
            make_scratch_folder(building, texts, config.scratch, seed)
        else:
            for tower, out in zip(_towers(origin, config), (building, building / SECOND)):
                save_encoder(load_encoder(tower, config, platform=platform), tower, out)
            if not config.state_prefix and not config.chunk_prefix:
                fix = "config.encoder.state_prefix and chunk_prefix begin texts with one"
                sentence_transformers.print_unused_prompts(origin, fix)
        load_encoder(building, config, platform=platform)  # refused before it is the run's own


def _towers(folder: Path, config: EncoderConfig) -> list[Path]:
    """The folder of an encoder; of an export, those of its two towers."""
    if not (folder / retriever_config.NAME).is_file():
        return [folder]
    exported = RetrieverConfig.read(folder)
    for name in ("state", "chunk"):
        prefix, trained = getattr(config, f"{name}_prefix"), getattr(exported, name).prefix
        if prefix != trained:
            raise InputError(
                f"config.encoder.{name}_prefix is {prefix!r}; set it as in {folder}: {trained!r}."
            )
    return [folder / exported.state.folder, folder / exported.chunk.folder]


def origin(path: str, workdir: Path) -> str:
    """What the encoder of the run in `workdir` was made from: a folder or hub name; "": nothing.

    Args:
        path: `config.encoder.path`. "minilm-or-scratch" leaves open which of both it was, which
            the size of the vocabulary tells.
    """
    if path == MINILM_OR_SCRATCH:
        words = read_config(workdir / FOLDER)["vocab_size"]
        path = MINILM if words == _WORDS_OF_MINILM else ""
    return HUB_NAME if path == MINILM else path


def _pretrained_folder(path: str) -> Path | None:
    if not path:
        return None
    if path not in (MINILM, MINILM_OR_SCRATCH):
        return resolve_folder(path)
    folder = find_minilm()
    if folder is None and path == MINILM:
        raise InputError(
            f"config.encoder.path is {MINILM!r}, but the model was found nowhere; give the folder "
            f"of another encoder, or the hub name {HUB_NAME}."
        )
    if folder is None:
        print("Training a small encoder from scratch instead.")
    return folder


# ---------------------------------------------------------------------- an encoder from scratch

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MAX_LETTERS = 1000  # size of the alphabet; rarer letters become [UNK]


def make_scratch_folder(
    folder: Path, texts: Iterable[str], config: ScratchConfig, seed: int
) -> None:
    """Writes a model folder in Hugging Face's layout: tokenizer, config.json, random weights."""
    if config.hidden % 2 or config.hidden % config.heads:
        raise InputError(
            f"config.encoder.scratch.hidden is {config.hidden}; use an even multiple of its heads."
        )
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = _train_tokenizer(folder, texts, config.vocab)
    bert = BertConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.hidden,
        max_position_embeddings=config.positions,
    )
    params = jax.tree.map(np.asarray, jax.jit(Transformer(bert).init_params)(jax.random.key(seed)))
    config_dict = {"model_type": "bert", **dataclasses.asdict(bert)}
    save_folder(BERT_TABLE, params, config_dict, folder, folder)


def _train_tokenizer(folder: Path, texts: Iterable[str], vocab: int) -> int:
    """Writes the tokenizer's files; the same texts always give the same ids."""
    texts = list(texts)
    learner = BertWordPieceTokenizer()
    alphabet = _alphabet(texts, learner)
    inside = [f"##{c}" for c in alphabet if len(_words(f"a{c}", learner)) == 1]
    # The trainer numbers "##" letters in random order and breaks ties by number, so two runs would
    # differ. Letters that are given as special tokens keep the given order.
    learner.train_from_iterator(
        iter(texts),
        vocab_size=vocab,
        min_frequency=0,
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        special_tokens=[*SPECIAL_TOKENS.values(), *inside],
        show_progress=False,
    )
    tokenizer = BertWordPieceTokenizer(learner.get_vocab())
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    write_json(folder / "tokenizer_config.json", settings)
    return tokenizer.get_vocab_size()


def _words(text: str, tokenizer: BertWordPieceTokenizer) -> list[str]:
    normalised = tokenizer.normalize(text)
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalised)]


def _alphabet(texts: Iterable[str], tokenizer: BertWordPieceTokenizer) -> list[str]:
    """The most frequent characters of the normalised texts, sorted."""
    raw = collections.Counter(itertools.chain.from_iterable(texts))
    counts: collections.Counter[str] = collections.Counter()
    for character, count in raw.items():
        for letter in "".join(_words(character, tokenizer)):
            counts[letter] += count
    ranked = sorted(counts, key=lambda letter: (-counts[letter], letter))
    return sorted(ranked[:MAX_LETTERS])
