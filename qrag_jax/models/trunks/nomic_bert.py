"""NomicBERT in Flax (Nussbaum et al., arXiv 2402.01613): the trunk of nomic-embed-text.

It is GTE's trunk without biases in its linear maps. In the files queries, keys and values are one
map, but the two halves of the feed-forward are two. `config.json` comes in two spellings: that of
the published folders, which is GPT-2's (n_embd, n_head), and that of transformers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from qrag_jax.errors import InputError
from qrag_jax.models.compute.linear import side_by_side
from qrag_jax.models.files.weight_names import NORM_LEAVES, NameTable, module_names
from qrag_jax.models.trunks.gte import ACTIVATIONS, QKV, UP_GATE, Gte, GteConfig
from qrag_jax.models.trunks.trunk import LAYERS, WORDS, Params, given_fields

# A field of published folders → the same field in transformers.
SPELLINGS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
GATED_SILU = "swiglu"  # what published folders call a feed-forward gated by "silu"
# Fields of published folders that choose another computation, and the values computed here.
CHOICES: dict[str, tuple[Any, ...]] = {
    "prenorm": (False,),
    "parallel_block": (False,),
    "causal": (False,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "use_rms_norm": (False, None),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "moe_every_n_layers": (-1, 0, None),
}


@dataclasses.dataclass(frozen=True)
class NomicBertConfig(GteConfig):
    """Sizes of a NomicBERT encoder, named as in transformers' `config.json`."""

    model_types: ClassVar[tuple[str, ...]] = ("nomic_bert",)
    BIASES: ClassVar[bool] = False
    DROPS_GATED: ClassVar[bool] = False

    type_vocab_size: int = 2
    hidden_act: str = "silu"
    rope_theta: float = 1000.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        known = CHOICES | {
            "model_type": cls.model_types,
            "hidden_act": ("silu", *ACTIVATIONS),
            "activation_function": (GATED_SILU,),
        }
        for name, values in known.items():
            value = config.get(name, values[0])
            if value not in values:
                them = ", ".join(map(repr, dict.fromkeys(values)))
                raise InputError(
                    f"{where}: {name} {value!r:.60} is not computed here, only {them}."
                )
        config = in_one_spelling(config)
        rope = config.get("rope_parameters") or {}
        if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise InputError(
                f"{where}: rope_scaling and rope_parameters ask for scaled positions, which are "
                "not computed here; use the model without them (rope_type 'default')."
            )
        theta = {"rope_theta": float(rope["rope_theta"])} if "rope_theta" in rope else {}
        result = cls(**given_fields(cls, config, where) | theta)
        wide = result.num_attention_heads * (config.get("head_dim") or result.head_dim)
        if wide != result.hidden_size or result.head_dim % 2:
            raise InputError(
                f"{where}: hidden_size {result.hidden_size} does not split into "
                f"{result.num_attention_heads} heads of even width (num_attention_heads)."
            )
        return result


def in_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed `config.json` that has transformers' fields too, whatever its spelling.

    Transformers' class ignores the published spelling. So a folder written with this content is
    read by it and by the published code.

    Positions of the published models are scaled only in rows above `max_trained_positions`, if
    `rotary_scaling_factor` is set. Such rows are not computed here, so that limit is the longest
    row then.
    """
    found = {**config}
    for theirs, name in SPELLINGS.items():
        if config.get(theirs) is not None and config.get(name) is None:
            found[name] = config[theirs]
    if found.get("hidden_act") == GATED_SILU:
        found["hidden_act"] = "silu"
    if "rope_theta" in found and config.get("rope_parameters") is None:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": found["rope_theta"]}
    if config.get("rotary_scaling_factor") is not None:
        found["max_position_embeddings"] = config.get("max_trained_positions", 2048)
    return found


class NomicBert(Gte):
    """NomicBERT: packed word vectors to last hidden states. Segment ids are all 0."""

    config: NomicBertConfig

    def join(self, layer: Params) -> Params:
        """Joins the two halves of the feed-forward, which are stored separately."""
        layer[UP_GATE] = side_by_side([layer.pop(name) for name in ("up", "gate")])
        return layer

    def split(self, layer: Params) -> Params:
        """The inverse of `join`."""
        parts = jax.tree.map(lambda leaf: jnp.split(leaf, 2, axis=-1), layer.pop(UP_GATE))
        for j, name in enumerate(("up", "gate")):
            layer[name] = {leaf: part[j] for leaf, part in parts.items()}
        return layer


LAYER = "encoder.layers.{}."
LAYER_DENSE = {
    QKV: "attn.Wqkv",
    "attention_output": "attn.out_proj",
    "up": "mlp.fc11",
    "gate": "mlp.fc12",
    "down": "mlp.fc2",
}

# The names of published folders, which transformers reads and writes, too. The folder of a model
# with a head (nomic-bert-2048) calls the trunk "bert".
TABLE = NameTable(
    names={
        (WORDS,): "embeddings.word_embeddings.weight",
        ("token_type_embeddings",): "embeddings.token_type_embeddings.weight",
    }
    | module_names((), "", {"embedding_norm": "emb_ln"}, NORM_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_DENSE, {"kernel": "weight"})
    | module_names(
        (LAYERS,), LAYER, {"attention_norm": "norm1", "output_norm": "norm2"}, NORM_LEAVES
    ),
    prefixes=("", "bert.", "nomic_bert.", "model.", "0.auto_model."),
    trunk=("embeddings.", "encoder.", "emb_ln."),
    ignored=re.compile(r"rotary_emb\.|embeddings\.(position_ids|token_type_ids)"),  # buffers
    model_type="nomic_bert",
    architecture="NomicBertModel",
)
