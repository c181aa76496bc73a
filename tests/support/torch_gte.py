"""GTE's encoder in plain torch, because transformers has no class for model_type "new".

The code follows the published definition (huggingface.co/Alibaba-NLP/new-impl, Apache-2.0) for
rotated positions and packed projections. Config fields, names of weights, places of dropout and
order of computation are the same. Importing this module registers the type with `AutoModel`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 2048,
    "type_vocab_size": 1,
    "layer_norm_type": "layer_norm",
    "layer_norm_eps": 1e-12,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}


class NewConfig(PretrainedConfig):
    """The fields of `config.json` with the published defaults."""

    model_type = "new"

    def __init__(self, **fields: Any) -> None:
        known = DEFAULTS | fields
        for name in DEFAULTS:
            setattr(self, name, known[name])
        super().__init__(**{name: v for name, v in fields.items() if name not in DEFAULTS})


NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


def cos_sin(config: NewConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[L, d]` of a head's pairs (j, j + d/2); each angle stands at both places.

    The frequencies are those of a table for rows as long as factor · max_position_embeddings.
    Scaling begins above max_position_embeddings, so it holds at every length.
    """
    width = config.hidden_size // config.num_attention_heads
    base, scaling = config.rope_theta, config.rope_scaling or {}
    factor, mixed = float(scaling.get("factor", 1.0)), scaling.get("mixed_b")
    numbers = torch.arange(0, width, 2).float() / width
    if factor <= 1:
        frequency = base**-numbers
    elif mixed is None:
        frequency = (base * factor) ** -numbers / factor ** (2 / width)
    else:
        slope = math.log(factor) / (width / 2) ** mixed
        frequency = base**-numbers / torch.exp(slope * torch.arange(1, width // 2 + 1) ** mixed)
    angle = torch.arange(length).float()[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


class Embeddings(nn.Module):
    """The sum of word and, if there are any, segment embeddings, normed."""

    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(tokens)
        if hasattr(self, "token_type_embeddings"):
            x = x + self.token_type_embeddings.weight[0]
        return self.dropout(self.LayerNorm(x))


class Attention(nn.Module):
    """Self-attention: every token of a row sees the whole row."""

    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.o_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, turn: Any) -> torch.Tensor:
        packed = self.qkv_proj(x).split(x.shape[-1], dim=-1)
        by_head = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in packed]
        query, key, value = turn(by_head[0]), turn(by_head[1]), by_head[2]
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
        attended = self.dropout(scores.softmax(-1)) @ value
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    """down(act(gate) · up); up is the first half of the packed map."""

    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.up_gate_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act, self.dropout = ACT2FN[config.hidden_act], nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.up_gate_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.dropout(self.act(gate) * up))


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input and normed after."""

    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        norm = NORMS[config.layer_norm_type]
        self.attention, self.mlp = Attention(config), GatedFeedForward(config)
        self.attn_ln = norm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp_ln = norm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, turn: Any) -> torch.Tensor:
        x = self.attn_ln(x + self.dropout(self.attention(x, bias, turn)))
        return self.mlp_ln(x + self.dropout(self.mlp(x)))


class NewModel(PreTrainedModel):
    """The trunk; its weights have the same names as in the published NewModel."""

    config: NewConfig
    config_class = NewConfig
    base_model_prefix = "new"

    def __init__(self, config: NewConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **unused: Any
    ) -> BaseModelOutput:
        """`[B, L]` → hidden states `[B, L, H]`; places are numbered from the left."""
        x = self.embeddings(input_ids)
        cos, sin = (table.to(x) for table in cos_sin(self.config, input_ids.shape[1]))

        def turn(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * cos + torch.cat([-second, first], dim=-1) * sin

        bias = (1 - attention_mask[:, None, None].to(x)) * torch.finfo(x.dtype).min
        for layer in cast(nn.ModuleList, self.encoder["layer"]):
            x = layer(x, bias, turn)
        return BaseModelOutput(last_hidden_state=x)


AutoConfig.register("new", NewConfig)
AutoModel.register(NewConfig, NewModel)
