"""Hugging Face's model of any family as a text encoder, with our rows, pooling and weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from qrag_jax.models.embedding import CLS, LAST, TextEncoder
from qrag_jax.models.trunks.families import FAMILIES

LEARNING_RATE, BETAS, EPS, DECAY = 1e-5, (0.9, 0.98), 1e-6, 0.01  # of AdamW, for both sides
ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def model_options(model_type: str) -> dict[str, Any]:
    """Arguments of AutoModel that leave out layers which retrievers do not use."""
    return {} if FAMILIES[model_type].config.PRE_NORM else {"add_pooling_layer": False}


def embed_rows(
    model: Any, encoder: TextEncoder, tokens: np.ndarray, lengths: np.ndarray
) -> torch.Tensor:
    """The vectors `[B, D]` of rows `[B, L]` that are padded on the right."""
    mask = torch.from_numpy(np.arange(tokens.shape[1]) < lengths[:, None]).long()
    output = model(input_ids=torch.from_numpy(tokens).long(), attention_mask=mask)
    return pool(encoder, output.last_hidden_state, mask)


def pool(encoder: TextEncoder, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """hidden `[B, L, H]`, mask `[B, L]`, padding on the right → float32 `[B, H]`."""
    lengths, row = mask.sum(1), torch.arange(len(mask), device=mask.device)
    if encoder.pooling in (LAST, CLS):
        place = lengths - 1 if encoder.pooling == LAST else torch.zeros_like(lengths)
        vectors = hidden[row, place].float()
    else:
        total = torch.einsum("bld,bl->bd", hidden.float(), mask.float())
        vectors = total / lengths[:, None]
    if encoder.normalise:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return encoder.scale * vectors


class Batch(NamedTuple):
    """tokens and mask `[B, L]` of one mini-batch, and the numbers `[B]` of its rows."""

    tokens: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor


def mini_batches(tokens: np.ndarray, lengths: np.ndarray, size: int, device: str) -> list[Batch]:
    """Rows `[N, L]` in mini-batches of `size`, each as wide as its longest row.

    Rows are sorted by length, the longest first, as in sentence-transformers.
    """
    order = np.argsort(-lengths, kind="stable")
    batches = []
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        width = int(lengths[rows].max())
        mask = np.arange(width) < lengths[rows][:, None]
        arrays = tokens[rows, :width].astype(np.int64), mask.astype(np.int64), rows
        batches.append(Batch(*(torch.from_numpy(array).to(device) for array in arrays)))
    return batches


class Peer:
    """The model with AdamW; its float32 weights compute under autocast if ours is in bfloat16."""

    def __init__(self, model: Any, encoder: TextEncoder, device: str, half: bool) -> None:
        self.model, self.encoder, self.device = model.to(device), encoder, device
        self.autocast = half
        # Embedding needs no gradients: there the weights themselves are in bfloat16.
        self.embedder = copy.deepcopy(self.model).to(torch.bfloat16) if half else self.model
        self.optimizer: torch.optim.Optimizer | None = None

    def embed(self, batches: Sequence[Batch]) -> np.ndarray:
        """Vectors `[N, D]`, in the order of the rows."""
        with torch.inference_mode():
            vectors = torch.cat([self._vectors(self.embedder, batch) for batch in batches])
            order = torch.cat([batch.rows for batch in batches]).argsort()
            return vectors[order].cpu().numpy()

    def step(self, batches: Sequence[Batch], target: torch.Tensor) -> float:
        """One update of AdamW on Σ <vector, target `[N, D]`>; returns that sum."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW, fused=True)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext():
                vectors = self._vectors(self.model, batch)
            loss = (vectors * target[batch.rows]).sum()
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return float(total)  # waits for the GPU

    def _vectors(self, model: Any, batch: Batch) -> torch.Tensor:
        hidden = model(input_ids=batch.tokens, attention_mask=batch.mask).last_hidden_state
        return pool(self.encoder, hidden, batch.mask)
