"""Makes a small BERT from scratch, with a WordPiece tokenizer trained on the run's texts."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors

from qrag_jax.errors import Count, InputError, least
from qrag_jax.models.files.weight_names import save_folder
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.trunks.encoder import Bert, BertConfig
from qrag_jax.models.trunks.families import BERT_TABLE
from qrag_jax.runtime.whole_files import write_whole

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MAX_LETTERS = 1000  # size of the alphabet; rarer letters become [UNK]


@dataclasses.dataclass(frozen=True)
class ScratchConfig:
    """Section `encoder.scratch`: sizes of the encoder."""

    layers: Count = 2  # transformer layers
    hidden: Annotated[int, least(2)] = 128  # 2D, width of an embedding
    heads: Count = 4  # attention heads
    vocab: Count = 8000  # most word pieces in the vocabulary
    positions: Annotated[int, least(3)] = 512  # longest row, in tokens


def make_scratch_folder(
    folder: Path, texts: Iterable[str], config: ScratchConfig, seed: int
) -> None:
    """Writes a model folder in Hugging Face's layout: tokenizer, config.json, random weights."""
    if config.hidden % 2 or config.hidden % config.heads:
        raise InputError(
            f"config.encoder.scratch.hidden is {config.hidden}; it must be even and a multiple of "
            f"config.encoder.scratch.heads, {config.heads}."
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
    encoder = TextEncoder(
        Bert(bert), bert.hidden_size, config.positions, opening_id=2, sep_id=3, pad_id=0
    )
    params = jax.tree.map(np.asarray, jax.jit(encoder.init)(jax.random.key(seed)))
    config_dict = {"model_type": "bert", **dataclasses.asdict(bert)}
    save_folder(BERT_TABLE, params, config_dict, folder, folder)


def _train_tokenizer(folder: Path, texts: Iterable[str], vocab: int) -> int:
    """Writes the tokenizer's files; the same texts always give the same ids."""
    texts = list(texts)
    learner = _untrained_tokenizer({})
    alphabet = _alphabet(texts, learner)
    inside = [f"##{c}" for c in alphabet if len(_words(f"a{c}", learner)) == 1]
    # The trainer numbers "##" letters in random order and breaks ties by number, so two runs would
    # differ. Letters that are given as special tokens keep the given order.
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab,
        special_tokens=[*SPECIAL_TOKENS.values(), *inside],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    ids = learner.get_vocab()
    tokenizer = _untrained_tokenizer(ids)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2))
    return tokenizer.get_vocab_size()


def _untrained_tokenizer(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    model = tokenizers.models.WordPiece(vocab, unk_token="[UNK]")  # noqa: S106
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _words(text: str, tokenizer: tokenizers.Tokenizer) -> list[str]:
    normalised = tokenizer.normalizer.normalize_str(text)
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalised)]


def _alphabet(texts: Iterable[str], tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The most frequent characters of the normalised texts, sorted."""
    raw: collections.Counter[str] = collections.Counter()
    for text in texts:
        raw.update(text)
    counts: collections.Counter[str] = collections.Counter()
    for character, count in raw.items():
        for letter in "".join(_words(character, tokenizer)):
            counts[letter] += count
    ranked = sorted(counts, key=lambda letter: (-counts[letter], letter))
    return sorted(ranked[:MAX_LETTERS])
