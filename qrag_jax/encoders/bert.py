"""BERT in Flax (Devlin et al., 2019): the trunk of Contriever, MiniLM and other BERT folders.

Layers are scanned, so a program holds one layer whatever the depth: compilation stays short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from qrag_jax.encoders.attention import padded_attention
from qrag_jax.errors import InputError


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x·Φ(x), exact; its gradient keeps x alone, a third of what autodiff would."""
    return jax.nn.gelu(x, approximate=False)


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    cdf = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * jnp.pi) ** -0.5
    return (gradient * (cdf + x * density),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT encoder, named as in Hugging Face's `config.json` (which see)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> BertConfig:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors.

        Raises:
            InputError: a size is missing, or the model is a BERT this module does not compute.
        """
        if config.get("model_type", "bert") != "bert":
            raise InputError(
                f"{where}: model_type {config['model_type']!r} is not supported; use a folder of a "
                "model_type 'bert' encoder, such as Contriever or MiniLM."
            )
        fields = dataclasses.fields(cls)
        absent = [
            f.name for f in fields if f.default is dataclasses.MISSING and f.name not in config
        ]
        if absent:
            raise InputError(f"{where}: the fields {', '.join(absent)} are missing.")
        result = cls(**{f.name: config[f.name] for f in fields if f.name in config})
        if result.hidden_act not in ACTIVATIONS:
            raise InputError(
                f"{where}: hidden_act {result.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}."
            )
        position = config.get("position_embedding_type", "absolute")
        if position != "absolute":
            raise InputError(
                f"{where}: position_embedding_type {position!r} is not supported, only 'absolute'."
            )
        if result.hidden_size % result.num_attention_heads:
            raise InputError(
                f"{where}: hidden_size {result.hidden_size} is not a multiple of "
                f"num_attention_heads {result.num_attention_heads}."
            )
        return result


class BertLayer(nn.Module):
    """Self-attention and feed-forward, each followed by a residual sum and a LayerNorm."""

    config: BertConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, None]:
        """x `[B, L, H]`, lengths `[B]` → (`[B, L, H]`, None), the shape `nn.scan` asks for."""
        c = self.config
        batch, length, width = x.shape
        heads = (batch, length, c.num_attention_heads, width // c.num_attention_heads)
        query, key, value = (
            nn.Dense(width, dtype=self.dtype, name=name)(x).reshape(heads)
            for name in ("query", "key", "value")
        )
        attended = padded_attention(query, key, value, lengths)
        attended = nn.Dense(width, dtype=self.dtype, name="attention_output")(
            attended.reshape(batch, length, width)
        )
        x = self._norm("attention_norm")(x + attended)
        hidden = nn.Dense(c.intermediate_size, dtype=self.dtype, name="intermediate")(x)
        hidden = ACTIVATIONS[c.hidden_act](hidden)
        hidden = nn.Dense(width, dtype=self.dtype, name="output")(hidden)
        return self._norm("output_norm")(x + hidden), None

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=self.config.layer_norm_eps, dtype=self.dtype, name=name)


class Bert(nn.Module):
    """Token ids to last hidden states; segment ids are all 0, as retrievers use it."""

    config: BertConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` int32, padded on the right; lengths `[B]` → hidden states `[B, L, H]`.

        Hidden states at positions ≥ length are finite but mean nothing.
        """
        c = self.config
        init = nn.initializers.normal(0.02)
        word = self.param("word_embeddings", init, (c.vocab_size, c.hidden_size))
        position = self.param(
            "position_embeddings", init, (c.max_position_embeddings, c.hidden_size)
        )
        segment = self.param("token_type_embeddings", init, (c.type_vocab_size, c.hidden_size))
        x = word[tokens] + position[: tokens.shape[1]] + segment[0]
        norm = nn.LayerNorm(epsilon=c.layer_norm_eps, dtype=self.dtype, name="embedding_norm")
        # Element-wise results are cheaper to compute again than to write out and read back.
        layer: Any = nn.remat(
            BertLayer, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
        )
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=c.num_hidden_layers,
        )
        x, _ = layers(c, self.dtype, name="layers")(norm(x), lengths)
        return x
