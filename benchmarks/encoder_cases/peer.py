"""Hugging Face's model of any family as a text encoder: the same rows, pooling and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qrag_jax.encoders.text_encoder import CLS, LAST, TextEncoder


def model_options(model_type: str) -> dict[str, Any]:
    """Arguments of AutoModel that leave out what retrievers do without."""
    return {"use_cache": False} if model_type == "qwen3" else {"add_pooling_layer": False}


def embed_rows(
    model: Any, encoder: TextEncoder, tokens: np.ndarray, lengths: np.ndarray, side: str = "right"
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Rows `[B, L]` padded on the right, computed as they are or padded on the left.

    Returns:
        Hidden states `[B, L, H]` before all layers and after each, normed as the last are, and the
        vectors `[B, D]` that `encoder` makes of the last.
    """
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    if side == "left":
        tokens = np.stack([np.roll(row, -length) for row, length in zip(tokens, lengths)])
        inside = inside[:, ::-1]
    mask = torch.from_numpy(inside.copy()).long()
    # BERT numbers places from the left whatever stands there, unless it is told.
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    output = model(
        input_ids=torch.from_numpy(tokens).long(),
        attention_mask=mask,
        output_hidden_states=True,
        **(positions if model.config.model_type == "bert" else {}),
    )
    # Qwen3's come without the final norm, but for the last.
    norm = getattr(model, "norm", torch.nn.Identity())
    states = [*map(norm, output.hidden_states[:-1]), output.last_hidden_state]
    first = mask.argmax(1)
    return states, pool(encoder, output.last_hidden_state, mask, first)


def pool(
    encoder: TextEncoder, hidden: torch.Tensor, mask: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """hidden `[B, L, H]`, mask `[B, L]`, first `[B]` (a row's first place) → float32 `[B, H]`."""
    lengths, row = mask.sum(1), torch.arange(len(mask), device=mask.device)
    if encoder.pooling in (LAST, CLS):
        place = first + lengths - 1 if encoder.pooling == LAST else first
        vectors = hidden[row, place].float()
    else:
        total = torch.einsum("bld,bl->bd", hidden.float(), mask.float())
        vectors = total / lengths[:, None]
    if encoder.normalise:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return encoder.scale * vectors
