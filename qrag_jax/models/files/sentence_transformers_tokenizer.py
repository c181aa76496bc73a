"""Writes the tokenizer of an exported tower; it turns plain texts into the rows of training."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.models.files.sentence_transformers import write_json
from qrag_jax.runtime.fast_tokenizer import auto_tokenizer

# Texts for comparing a written tokenizer with the one of training.
PROBES = ("Who wrote it, in 1984?", " Two  spaces\nand a new line. ", "Zürich, naïve; 東京 → ½", "")
LONG = "the moth is a thing of the night " * 40


def token_name(tokenizer: TextTokenizer, index: int) -> str:
    """The token with this id, as it is written in texts; raises ValueError if there is none."""
    name = tokenizer.backend.id_to_token(index)
    if name is None:
        raise ValueError(f"the tokenizer has no token {index}")
    return name


def write_tokenizer(
    out: Path, tokenizer: TextTokenizer, opening: tuple[int, ...], *, max_tokens: int, plain: bool
) -> None:
    """Writes a tokenizer that turns texts into a tower's rows: `opening text [SEP]`.

    The tower's prefix is part of `opening`, token by token as in training, so it needs no prompt.

    Args:
        out: the model's folder.
        tokenizer: the tokenizer of training.
        opening: `state_opening` or `chunk_opening` of the encoder.
        max_tokens: longer rows are cut.
        plain: whether special tokens in a text are read as plain text. If not, they are read as
            special tokens, which join the parts of a state.
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
    """Checks that the tokenizer written to `folder` gives the rows of training.

    Args:
        folder: the model's folder. The other arguments are those of `write_tokenizer`.
    """
    written = auto_tokenizer().from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, model_max_length=10**9
    )
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
