"""A model folder as a ready encoder: architecture, weights and tokenizer that fit together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.encoders.bert import Bert, BertConfig
from qrag_jax.encoders.bert_weights import params_from_tensors
from qrag_jax.encoders.model_files import read_config, read_tensors
from qrag_jax.encoders.precision import precision
from qrag_jax.encoders.text_encoder import TextEncoder
from qrag_jax.encoders.trunk import REMAT_POLICIES, Params
from qrag_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class LoadedEncoder:
    """An encoder with the parameters of one tower (float32 NumPy) and what it was read from."""

    encoder: TextEncoder
    params: Params
    tokenizer: TextTokenizer
    model_config: dict[str, Any]


def load_encoder(
    folder: Path, dtype: str = "float32", scale: float = 0.1, remat: str = "none"
) -> LoadedEncoder:
    """Reads a BERT folder in Hugging Face's layout.

    Args:
        dtype: of the computation (see `precision`). remat: a name of `trunk.REMAT_POLICIES`.
        scale: factor on the pooled embedding (Q-RAG: 0.1).

    Raises:
        InputError: a file is missing or broken, the weights do not fit config.json, the
            tokenizer does not fit the weights, or the dtype or remat is unknown.
    """
    computed_in = precision(dtype)
    if remat not in REMAT_POLICIES:
        names = ", ".join(REMAT_POLICIES)
        raise InputError(f"config.encoder.remat is {remat!r}; use one of {names}.")
    model_config = read_config(folder)
    config = BertConfig.from_dict(model_config, str(folder / "config.json"))
    if config.hidden_size % 2:
        raise InputError(
            f"{folder / 'config.json'}: hidden_size {config.hidden_size} is odd, but an embedding "
            "is read as two halves; use an encoder of even width."
        )
    params = params_from_tensors(read_tensors(folder), config, str(folder))
    tokenizer = TextTokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens but the weights hold "
            f"{config.vocab_size} (vocab_size in config.json); put the model's own tokenizer there."
        )
    encoder = TextEncoder(
        module=Bert(config, computed_in, remat),
        width=config.hidden_size,
        max_positions=config.max_position_embeddings,
        opening_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.pad_id,
        scale=scale,
    )
    return LoadedEncoder(encoder, params, tokenizer, model_config)
