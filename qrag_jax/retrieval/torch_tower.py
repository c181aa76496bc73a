"""An exported tower through torch and sentence-transformers, fed with ids and not with texts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.tower_rows import Rows

_TOKENS_AT_ONCE = 16_384  # padding counted


class TorchTower:
    """One tower, as `tower_rows.RowEncoder`.

    Args:
        device: such as "cpu" or "cuda:0"; "": the one that sentence-transformers chooses.
    """

    def __init__(self, folder: Path, pad_id: int, device: str = "") -> None:
        missing = [
            name
            for name in ("torch", "sentence_transformers")
            if importlib.util.find_spec(name) is None
        ]
        if missing:
            raise InputError(
                f"{' and '.join(missing)} must be installed to embed with torch; install "
                "sentence-transformers, or choose backend=jax."
            )
        import sentence_transformers  # slow to import

        try:
            self._model = sentence_transformers.SentenceTransformer(
                str(folder),
                device=device or None,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            told = str(error).strip().split("\n")[0]
            raise InputError(
                f"{folder}: sentence-transformers cannot read the tower ({told}); export the run "
                "again."
            ) from None
        self._pad_id = pad_id

    def __call__(self, rows: Rows) -> np.ndarray:
        """float32 `[rows, width]`; rows of like lengths are computed together."""
        import torch

        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        parts: list[tuple[list[int], np.ndarray]] = []
        while order:
            most = max(_TOKENS_AT_ONCE // len(rows[order[-1]]), 1)
            chosen, order = order[-most:], order[:-most]
            with torch.inference_mode():
                found = self._model(self._padded([rows[i] for i in chosen]))["sentence_embedding"]
            parts.append((chosen, found.float().cpu().numpy()))
        width = parts[0][1].shape[1] if parts else 0
        vectors = np.empty((len(rows), width), np.float32)
        for places, found in parts:
            vectors[places] = found
        return vectors

    def _padded(self, rows: Rows) -> dict[str, Any]:
        import torch

        longest = max(map(len, rows))
        ids = np.full((len(rows), longest), self._pad_id)
        mask = np.zeros((len(rows), longest), np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        device = self._model.device
        return {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(mask).to(device),
        }
