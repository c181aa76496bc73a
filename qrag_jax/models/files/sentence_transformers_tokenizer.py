"""The tokenizer of an exported tower: plain texts to the rows of training."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.models.files.sentence_transformers import write_json

# Texts by which a written tokenizer is compared with the one of training.
PROBES = ("Who wrote it, in 1984?", " Two  spaces\nand a new line. ", "Zürich, naïve; 東京 → ½", "")
LONG = "the moth is a thing of the night " * 40


def token_name(tokenizer: TextTokenizer, index: int) -> str:
    """The token of this id as it is written in texts."""
    name = tokenizer.backend.id_to_token(index)
    if name is None:
        raise ValueError(f"the tokenizer has no token {index}")
    return name


def write_tokenizer(
    out: Path, tokenizer: TextTokenizer, opening: tuple[int, ...], *, max_tokens: int, plain: bool
) -> None:
    """Writes a tokenizer that makes a tower's rows of texts: `opening text [SEP]`.

    A prefix is part of `opening`, token by token as in training, so it needs no prompt.

    Args:
        opening: `state_opening` or `chunk_opening` of the encoder.
        plain: special tokens written in a text are text; else they are themselves, with which a
            state's parts are joined.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    pieces = {"opening": list(opening), "end": [tokenizer.sep_id]}
    special = [
        {"id": name, "ids": ids, "tokens": [backend.id_to_token(i) for i in ids]}
        for name, ids in pieces.items()
        if ids
    ]
    template = [*(["opening"] if opening else []), "$A", "end"]
    backend.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B", "end"], special_tokens=special
    )
    backend.save(str(out / "tokenizer.json"))
    named = {"sep_token": tokenizer.sep_id, "pad_token": tokenizer.pad_id}
    named |= {} if tokenizer.cls_id is None else {"cls_token": tokenizer.cls_id}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_tokens,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": plain,
    }
    tokens = {name: token_name(tokenizer, index) for name, index in named.items()}
    write_json(out / "tokenizer_config.json", config | tokens)


def check_tokenizer(
    folder: Path,
    tokenizer: TextTokenizer,
    opening: tuple[int, ...],
    *,
    max_tokens: int,
    plain: bool,
) -> None:
    """Compares the tokenizer that was written to `folder` with the rows of training.

    Args:
        tokenizer, opening, max_tokens, plain: as `write_tokenizer` was given them.

    Raises:
        InputError: it gives other ids.
    """
    from transformers import AutoTokenizer  # slow to import

    written = AutoTokenizer.from_pretrained(folder, local_files_only=True, model_max_length=10**9)
    separator = token_name(tokenizer, tokenizer.sep_id)
    rows: list[tuple[str, ...]] = [*((text,) for text in PROBES), (LONG,)]
    rows.append((f"a {separator} b",) if plain else PROBES)
    for row in rows:
        text, whole = separator.join(row), list(opening)
        for ids in tokenizer.encode(row):
            whole += [*ids, tokenizer.sep_id]
        cut = whole if len(whole) <= max_tokens else [*whole[: max_tokens - 1], tokenizer.sep_id]
        found = written(text)["input_ids"]
        found_cut = written(text, truncation=True, max_length=max_tokens)["input_ids"]
        for there, here in ((found, whole), (found_cut, cut)):
            if there != here:
                raise InputError(
                    f"{folder.name}: the run's tokenizer cannot be exported, since a plain text "
                    f"such as {text[:60]!r} would become other tokens than in training; embed with "
                    "qrag_jax, or train with another encoder."
                )
