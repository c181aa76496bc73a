"""The families of models: sizes, spellings of `config.json`, and names of weights in files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import numpy as np

from qrag_jax.errors import Count, InputError, Positive, least
from qrag_jax.models.compute.dropout import GATED, OUTPUT
from qrag_jax.models.files.weight_names import NameTable, name_table
from qrag_jax.models.trunks import transformer
from qrag_jax.runtime.config_fields import check_value

# ---------------------------------------------------------------------- BERT and RoBERTa

EMBEDDINGS = {
    transformer.WORDS: "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
PROJECTIONS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class BertConfig(transformer.Sizes):
    """BERT (Devlin et al., 2019)."""

    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": tuple(transformer.ACTIVATIONS),
        "position_embedding_type": ("absolute",),
    }
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {transformer.QKV: PROJECTIONS}
    COLUMNS: ClassVar[tuple[str, ...]] = (*PROJECTIONS, "intermediate")
    ROWS: ClassVar[tuple[str, ...]] = ("attention_output", "output")


BERT_TABLE = name_table(
    BertConfig,
    EMBEDDINGS,
    "encoder.layer.{}.",
    "query attention.self.query, key attention.self.key, value attention.self.value, "
    "attention_output attention.output.dense, attention_norm attention.output.LayerNorm, "
    "intermediate intermediate.dense, output output.dense, output_norm output.LayerNorm",
    model_type="bert",
    architecture="BertModel",
)


@dataclasses.dataclass(frozen=True)
class XlmRobertaConfig(BertConfig):
    """XLM-RoBERTa (Conneau et al., 2020) or RoBERTa (Liu et al., 2019): BERT, shifted positions.

    XLM-RoBERTa is the trunk of multilingual E5. The position table begins with unused rows, one for
    each id up to the padding token's, as in the models of Hugging Face and fairseq;
    `max_position_embeddings` counts them, too.
    """

    pad_token_id: int = 1

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1


XLM_ROBERTA_TABLE = dataclasses.replace(
    BERT_TABLE, config=XlmRobertaConfig, model_type="xlm-roberta", architecture="XLMRobertaModel"
)
ROBERTA_TABLE = dataclasses.replace(
    XLM_ROBERTA_TABLE, model_type="roberta", architecture="RobertaModel"
)


# ---------------------------------------------------------------------- MPNet


@dataclasses.dataclass(frozen=True)
class MpnetConfig(BertConfig):
    """MPNet (Song et al., arXiv 2004.09297): the trunk of all-mpnet-base-v2.

    It is BERT with shifted positions and without segments. Besides, a learned number for each
    distance between two tokens is added to the scores of attention. One table holds these numbers
    for all layers; far distances share a row of it (`buckets`).
    """

    BUCKETS: ClassVar[int] = 32
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **BertConfig.CHOICES,
        "relative_attention_num_buckets": (32,),
        "pad_token_id": (1,),
    }

    type_vocab_size: int = 0

    @property
    def first_position(self) -> int:
        return 2  # the models of Hugging Face fix their padding id at 1


MPNET_TABLE = name_table(
    MpnetConfig,
    EMBEDDINGS | {transformer.DISTANCES: "encoder.relative_attention_bias"},
    "encoder.layer.{}.",
    "query attention.attn.q, key attention.attn.k, value attention.attn.v, "
    "attention_output attention.attn.o, attention_norm attention.LayerNorm, "
    "intermediate intermediate.dense, output output.dense, output_norm output.LayerNorm",
    model_type="mpnet",
    architecture="MPNetModel",
)


# ---------------------------------------------------------------------- GTE


@dataclasses.dataclass(frozen=True)
class GteConfig(transformer.Sizes):
    """GTE's encoder (Zhang et al., arXiv 2407.19669, "mGTE"): rotated, with a gated feed-forward.

    It is the trunk of gte-multilingual-base and gte-base-en-v1.5, whose class is called NewModel
    and whose model_type is "new" (huggingface.co/Alibaba-NLP/new-impl).
    """

    ROTATES: ClassVar[bool] = True
    GATED_MAP: ClassVar[str] = "up_gate"
    DROPS: ClassVar[tuple[int, ...]] = (GATED, OUTPUT)
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": tuple(transformer.ACTIVATIONS),
        "layer_norm_type": ("layer_norm", "rms_norm"),
        "position_embedding_type": ("rope",),
        "pack_qkv": (True,),
        "logn_attention_scale": (False,),
    }

    max_position_embeddings: transformer.Size = 2048
    type_vocab_size: int = 1
    layer_norm_type: str = "layer_norm"
    rope_theta: float = 1e4
    # How many times longer rows may be than those of the first training; 1: no scaling
    rope_factor: float = 1.0
    rope_mixed_b: float | None = None  # b of mixed NTK scaling; None: fixed NTK scaling

    @property
    def norm(self) -> Callable[..., nn.Module]:
        return nn.LayerNorm if self.layer_norm_type == "layer_norm" else nn.RMSNorm

    @property
    def rotations(self) -> tuple[np.ndarray, ...]:
        """Fixed NTK scaling by k replaces θ by θ·k and divides all frequencies by k^(2/d).

        Mixed scaling divides the m-th frequency by exp(log k / (d/2)^b · m^b) (Su,
        kexue.fm/archives/9706, equations 6 and 10 to 13). The published code has one table of these
        frequencies, k times as long as the longest row, so the same apply to every row.
        """
        width, factor, b = self.head_dim, self.rope_factor, self.rope_mixed_b
        plain = transformer.frequencies(self.rope_theta * (factor if b is None else 1.0), width)
        if b is None:
            return (plain / factor ** (2 / width),)
        number = np.arange(1, width // 2 + 1, dtype=np.float64)
        return (plain / np.exp(np.log(factor) / (width / 2) ** b * number**b),)

    @classmethod
    def further_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        theta, scaling = transformer.rotation_fields(config, where, "ntk")
        if scaling is not None:
            least_1 = Annotated[float, least(1)]
            factor = check_value(least_1, scaling.get("factor"), f"{where}: rope_scaling.factor")
            theta |= {"rope_factor": factor, "rope_mixed_b": scaling.get("mixed_b")}
        return theta


# Published folders hold a model with a head, in which the trunk is called "new"
# (gte-multilingual-base: NewForTokenClassification). Folders written here hold NewModel, the trunk.
GTE_TABLE = name_table(
    GteConfig,
    EMBEDDINGS,
    "encoder.layer.{}.",
    "query_key_value attention.qkv_proj, attention_output attention.o_proj, "
    "attention_norm attn_ln, up_gate mlp.up_gate_proj, down mlp.down_proj, output_norm mlp_ln",
    model_type="new",
    architecture="NewModel",
)


# ---------------------------------------------------------------------- NomicBERT

# A field of published folders → the same field in transformers.
NOMIC_SPELLINGS = {
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


@dataclasses.dataclass(frozen=True)
class NomicBertConfig(GteConfig):
    """NomicBERT (Nussbaum et al., arXiv 2402.01613): the trunk of nomic-embed-text.

    It is GTE's trunk without biases. `config.json` comes in two spellings: that of the published
    folders, which is GPT-2's (n_embd, n_head), and that of transformers.
    """

    BIASES: ClassVar[tuple[bool, bool, bool]] = (False, False, False)
    DROPS: ClassVar[tuple[int, ...]] = (OUTPUT,)
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"up_gate": ("up", "gate")}
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu", *transformer.ACTIVATIONS),
        "activation_function": ("swiglu",),
        **dict.fromkeys(("prenorm", "parallel_block", "causal", "qkv_proj_bias"), (False,)),
        **dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved"), (False,)),
        "use_rms_norm": (False, None),
        "rotary_emb_fraction": (1.0,),
        "rotary_emb_scale_base": (None,),
        "moe_every_n_layers": (-1, 0, None),
    }

    type_vocab_size: int = 2
    hidden_act: str = "silu"
    rope_theta: float = 1000.0

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """A parsed `config.json` that has transformers' fields too, whatever its spelling.

        Transformers' class ignores the published spelling. So a folder written with this content is
        read by it and by the published code.

        Positions of the published models are scaled only in rows above `max_trained_positions`,
        if `rotary_scaling_factor` is set. Such rows are not computed here, so that limit is the
        longest row then.
        """
        fields = {**config}
        for theirs, name in NOMIC_SPELLINGS.items():
            if config.get(theirs) is not None and config.get(name) is None:
                fields[name] = config[theirs]
        if fields.get("hidden_act") == "swiglu":
            fields["hidden_act"] = "silu"
        if "rope_theta" in fields and config.get("rope_parameters") is None:
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
        if config.get("rotary_scaling_factor") is not None:
            fields["max_position_embeddings"] = config.get("max_trained_positions", 2048)
        return fields

    @classmethod
    def further_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        theta, _ = transformer.rotation_fields(config, where)
        heads, width = config["num_attention_heads"], config["hidden_size"]
        if heads * (config.get("head_dim") or width // heads) != width:
            raise InputError(f"{where}: hidden_size {width} is not {heads} heads of head_dim.")
        return theta


# The names of published folders, which transformers reads and writes, too. The folder of a model
# with a head (nomic-bert-2048) calls the trunk "bert".
NOMIC_TABLE = name_table(
    NomicBertConfig,
    EMBEDDINGS | {"embedding_norm": "emb_ln"},
    "encoder.layers.{}.",
    "query_key_value attn.Wqkv, attention_output attn.out_proj, attention_norm norm1, "
    "up mlp.fc11, gate mlp.fc12, down mlp.fc2, output_norm norm2",
    model_type="nomic_bert",
    architecture="NomicBertModel",
)


# ---------------------------------------------------------------------- ModernBERT

GLOBAL, LOCAL = LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(transformer.Sizes):
    """ModernBERT (Warner et al., arXiv 2412.13663), also of modernbert-embed-base.

    In most layers a token sees only its neighbours; these layers turn positions faster.
    """

    PRE_NORM: ClassVar[bool] = True
    FIRST_NORM: ClassVar[bool] = False
    ROTATES: ClassVar[bool] = True
    GATED_MAP: ClassVar[str] = "gate_up"  # first what is activated, then what multiplies
    BIASES: ClassVar[tuple[bool, bool, bool]] = (False, False, False)
    DROPS: ClassVar[tuple[int, ...]] = (GATED,)
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_activation": tuple(transformer.ACTIVATIONS),
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), (False,)),
        "rope_scaling": (None, {}),
    }
    SPELLINGS: ClassVar[Mapping[str, str]] = {
        "norm_eps": "layer_norm_eps",
        "hidden_activation": "hidden_act",
    }

    max_position_embeddings: transformer.Size = 8192
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-5
    local_attention: transformer.Size = 128  # a local layer's token sees half on each side
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    layer_types: tuple[str, ...] = ()  # a name of `LAYER_TYPES` for each layer

    @property
    def local(self) -> tuple[int, tuple[bool, ...]]:
        return self.local_attention // 2, tuple(kind == LOCAL for kind in self.layer_types)

    @property
    def rotations(self) -> tuple[np.ndarray, ...]:
        thetas = (self.global_rope_theta, self.local_rope_theta)
        return tuple(transformer.frequencies(theta, self.head_dim) for theta in thetas)

    @classmethod
    def further_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Thetas and kinds of layers, in either spelling: lists, or every how many is global."""
        fields: dict[str, Any] = {}
        for kind, field in ((GLOBAL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
            rope = (config.get("rope_parameters") or {}).get(kind)
            theta, _ = transformer.rotation_fields({"rope_parameters": rope}, where)
            value = theta.get("rope_theta", config.get(field, getattr(cls, field)))
            fields[field] = check_value(Positive, value, f"{where}: {field}")
        count, kinds = config["num_hidden_layers"], config.get("layer_types")
        every = config.get("global_attn_every_n_layers", 3)
        check_value(Count, every, f"{where}: global_attn_every_n_layers")
        if kinds is None:
            kinds = [LOCAL if number % every else GLOBAL for number in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {*LAYER_TYPES}:
            raise InputError(
                f"{where}: layer_types is {kinds!r:.60}; it must name {' or '.join(LAYER_TYPES)} "
                f"for each of the {count} layers (num_hidden_layers)."
            )
        return fields | {"layer_types": tuple(kinds)}


# Published folders with a head ("head.", "decoder.", "classifier.") call the trunk "model".
MODERNBERT_TABLE = name_table(
    ModernBertConfig,
    {
        transformer.WORDS: "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
        "final_norm": "final_norm",
    },
    "layers.{}.",
    "attention_norm attn_norm, query_key_value attn.Wqkv, attention_output attn.Wo, "
    "feed_forward_norm mlp_norm, gate_up mlp.Wi, down mlp.Wo",
    model_type="modernbert",
    architecture="ModernBertModel",
    absent=("layers.0.attn_norm.weight",),
)


# ---------------------------------------------------------------------- Qwen3 and its kin

QWEN3, QWEN2, LLAMA = KINDS = ("qwen3", "qwen2", "llama")  # by the model_type of config.json


# How slow pairs are slowed down, named as in Hugging Face's `config.json`.
LLAMA3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]


def slowed(
    frequency: np.ndarray, factor: float, low: float, high: float, original: float
) -> np.ndarray:
    """Pairs with few turns in the original context get 1/factor of their frequency.

    Those with many keep it, and in between it goes from the one to the other. The arguments are
    those of `LLAMA3`.
    """
    turns = original * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1 - kept) / factor)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(transformer.Sizes):
    """Qwen3 (Yang et al., arXiv 2505.09388), also of Qwen3-Embedding (arXiv 2506.05176).

    It has no biases by default, queries and keys are normalised head by head, and a few query heads
    share one key head. Llama 3 (Grattafiori et al., arXiv 2407.21783) and its kin, such as SmolLM2,
    and Qwen2.5 have the same layers without norms of heads; Qwen2.5 (arXiv 2412.15115) has biases.
    Llama 3.1 and later turn slow pairs slower, for longer contexts.
    """

    CAUSAL: ClassVar[bool] = True
    PRE_NORM: ClassVar[bool] = True
    ROTATES: ClassVar[bool] = True
    GATED_MAP: ClassVar[str] = "gate_up"
    DROPS: ClassVar[tuple[int, ...]] = ()
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        transformer.QKV: ("query", "key", "value"),
        "gate_up": ("gate", "up"),
    }
    COLUMNS: ClassVar[tuple[str, ...]] = ("query", "key", "value", "gate", "up")
    ROWS: ClassVar[tuple[str, ...]] = ("attention_output", "down")
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False, None),  # windowed attention
        "mlp_bias": (False, None),
    }
    SPELLINGS: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    num_key_value_heads: transformer.Size = dataclasses.field(kw_only=True)
    head_dim: transformer.Size = 128
    max_position_embeddings: transformer.Size = 32768
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 1e4
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    model_type: str = QWEN3
    scaling: tuple[float, ...] = ()  # the values of `LLAMA3`; (): positions are not scaled

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def norms_heads(self) -> bool:
        return self.model_type == QWEN3

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        if self.model_type == QWEN2:
            return True, False, False
        return self.attention_bias, self.attention_bias, False

    @property
    def norm(self) -> Callable[..., nn.Module]:
        """x / √mean(x²) · scale over the last axis (Zhang & Sennrich, 2019)."""
        return nn.RMSNorm

    @property
    def rotations(self) -> tuple[np.ndarray, ...]:
        plain = transformer.frequencies(self.rope_theta, self.head_dim)
        return (slowed(plain, *self.scaling) if self.scaling else plain,)

    @classmethod
    def further_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        kinds = config.get("layer_types") or ()
        if not {*kinds} <= {"full_attention"}:
            raise InputError(
                f"{where}: layer_types {kinds!r:.60} ask for windowed attention, which is not "
                "computed here; use a model whose layers all have full attention."
            )
        kind = config.get("model_type", QWEN3)
        fields, scaling = transformer.rotation_fields(
            config, where, "llama3" if kind == LLAMA else ""
        )
        if scaling is not None:
            rope = f"{where}: rope_parameters"
            read = [check_value(Positive, scaling.get(n), f"{rope}.{n}") for n in LLAMA3]
            if read[2] <= read[1]:
                raise InputError(f"{rope}.high_freq_factor is not above low_freq_factor.")
            fields["scaling"] = tuple(read)
        if kind != QWEN3 and config.get("head_dim") is None:  # all heads are H wide
            fields["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        return fields


# A language-model head ("lm_head.weight", of models whose head is not tied to the word table)
# lies outside the trunk and is ignored: an encoder does not need it.
QWEN3_TABLE = name_table(
    Qwen3Config,
    {transformer.WORDS: "embed_tokens", "final_norm": "norm"},
    "layers.{}.",
    "attention_norm input_layernorm, query self_attn.q_proj, key self_attn.k_proj, "
    "value self_attn.v_proj, query_norm self_attn.q_norm, key_norm self_attn.k_norm, "
    "attention_output self_attn.o_proj, feed_forward_norm post_attention_layernorm, "
    "gate mlp.gate_proj, up mlp.up_proj, down mlp.down_proj",
    model_type="qwen3",
    architecture="Qwen3Model",
)


# ---------------------------------------------------------------------- the families


# The families by the model_type of config.json. A decoder is an encoder as Qwen3-Embedding is: rows
# begin with their text, the last token's hidden state is the vector, normalised unless the folder
# says otherwise, and training drops nothing.
FAMILIES = {
    table.model_type: table
    for table in (
        *(BERT_TABLE, QWEN3_TABLE, GTE_TABLE, XLM_ROBERTA_TABLE, ROBERTA_TABLE),
        *(MODERNBERT_TABLE, MPNET_TABLE, NOMIC_TABLE),
    )
}
HEAD_NAME, _TRUNK = "lm_head.weight", "model."
# Language models, likewise, with the names of trunk and head.
DECODERS = {
    kind: dataclasses.replace(
        QWEN3_TABLE,
        names={at: _TRUNK + name for at, name in QWEN3_TABLE.names.items()}
        | {(transformer.HEAD,): HEAD_NAME},
        model_type=kind,
        architecture=f"{kind.capitalize()}ForCausalLM",
    )
    for kind in KINDS
}


def family_of(
    model_config: Mapping[str, Any], where: str, families: Mapping[str, NameTable] = FAMILIES
) -> NameTable:
    """The family of a parsed `config.json`; `where` names the file in errors."""
    model_type = model_config.get("model_type", "bert")
    if not isinstance(model_type, str) or model_type not in families:
        raise InputError(
            f"{where}: the architecture {model_type!r:.60} "
            f"({model_config.get('architectures')!r:.100}) is not computed here; use a folder "
            f"whose model_type is one of {', '.join(families)}."
        )
    return families[model_type]
