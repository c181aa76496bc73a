"""Hugging Face BERT as the peers' text tower, with the same weights as our tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import BertConfig as TorchBertConfig
from transformers import BertModel

from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.trunks.bert import Bert, BertConfig
from qrag_jax.models.trunks.bert_weights import tensors_from_params
from qrag_jax.rollouts.chunks import CHUNK, STATE


class Rows(NamedTuple):
    """tokens `[N, L]` padded on the right, lengths `[N]`: int64 tensors on the tower's device."""

    tokens: torch.Tensor
    lengths: torch.Tensor

    def pick(self, index: torch.Tensor) -> Rows:
        """The rows of `index`."""
        return Rows(self.tokens[index], self.lengths[index])


@dataclasses.dataclass
class Counter:
    """Counts the tokens that towers compute; adding to it does not wait for the GPU."""

    computed: int = 0
    device_text: torch.Tensor | int = 0

    def add(self, rows: Rows) -> None:
        """Counts one batch of rows."""
        self.computed += rows.tokens.numel()
        self.device_text = self.device_text + rows.lengths.sum()

    @property
    def text(self) -> int:
        """How many of the tokens were text; this waits for the GPU."""
        return int(self.device_text)

    @property
    def padding_share(self) -> float:
        """The share of the computed tokens that carried no text."""
        return 1.0 - self.text / max(self.computed, 1)


class Tower(torch.nn.Module):
    """Masked mean of BERT's last hidden states times `scale`; autocast if ours is in bfloat16."""

    def __init__(self, encoder: TextEncoder, params: Params, device: torch.device) -> None:
        super().__init__()
        assert isinstance(encoder.module, Bert)
        self.model = _bert(encoder.module.config, params).to(device)
        self.run: Any = self.model  # called by forward(): the model, compiled or not
        self.autocast = encoder.module.precision.products == jnp.bfloat16
        self.scale = encoder.scale
        self.device = device
        self.counter: Counter | None = None

    def compile_model(self) -> None:
        """Runs the model through torch.compile from now on, one program for all shapes."""
        self.run = torch.compile(self.model, dynamic=True)

    def forward(self, rows: Rows, *, full: bool = False) -> torch.Tensor:
        """Rows of at least one token → float32 embeddings `[N, D]`; `full`: no row is padded."""
        if self.counter is not None:
            self.counter.add(rows)
        inside = torch.arange(rows.tokens.shape[1], device=self.device) < rows.lengths[:, None]
        # A new context per call: weights that were cast under no_grad must not be reused with grad.
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext():
            mask = None if full else inside
            hidden = self.run(input_ids=rows.tokens, attention_mask=mask).last_hidden_state
        total = torch.einsum("bld,bl->bd", hidden.float(), inside.float())
        return self.scale * total / rows.lengths[:, None]

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights under Hugging Face's names."""
        return {name: p.detach().cpu().numpy() for name, p in self.model.named_parameters()}


class Pair(torch.nn.Module):
    """The state tower and the chunk tower of one role (online or target)."""

    def __init__(self, encoder: TextEncoder, params: Params, device: torch.device) -> None:
        super().__init__()
        self.state = Tower(encoder, tower_params(params, STATE), device)
        self.chunk = Tower(encoder, tower_params(params, CHUNK), device)

    def towers(self) -> Iterator[Tower]:
        """Both towers."""
        yield self.state
        yield self.chunk


def tower_params(params: Params, tower: int) -> Params:
    """One of the two towers stacked on axis 0, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[tower]), params)


def pad_rows(rows: list[list[int]], width: int, pad_id: int, device: torch.device) -> Rows:
    """Pads lists of token ids on the right to `[N, width]`."""
    tokens = np.full((len(rows), width), pad_id, np.int64)
    for place, row in zip(tokens, rows):
        place[: len(row)] = row
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return Rows(torch.from_numpy(tokens).to(device), lengths)


def _bert(config: BertConfig, params: Params) -> torch.nn.Module:
    theirs = TorchBertConfig(
        **dataclasses.asdict(config), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    theirs._attn_implementation = "sdpa"
    model = BertModel(theirs, add_pooling_layer=False).eval()
    tensors = {name: torch.tensor(array) for name, array in tensors_from_params(params).items()}
    model.load_state_dict(tensors, strict=True)
    return model
