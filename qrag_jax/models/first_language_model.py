"""Section `model` of a config, and the language model that a run starts from, with its adapters.

A given model stays where it is: the run's folder keeps what is learnt, not a copy of the base. A
tiny Qwen3 with random weights, made for the run, is written into the run's folder. Its tokenizer is
a byte-level BPE trained on given texts. Two rules of how it cuts texts into words make unseen names
easy to copy: a capitalised word does not carry the blank before it, and digits stand alone. So a
name is the same tokens after a blank, after a quotation mark and at the start.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from qrag_jax.errors import Count, InputError, Natural, Positive, least, one_of
from qrag_jax.models import pretrained
from qrag_jax.models.compute.precision import AUTO, FLOAT32, NAMES
from qrag_jax.models.embedding import LanguageModel
from qrag_jax.models.files.model_folder import GENERATION, read_json, resolve_folder
from qrag_jax.models.files.weight_names import save_folder
from qrag_jax.models.trunks.families import DECODERS, Qwen3Config
from qrag_jax.models.trunks.transformer import REMAT_POLICIES, Params, Transformer
from qrag_jax.runtime import hosts, own_code
from qrag_jax.runtime.config_fields import check_value, internal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import read_fast_tokenizer
from qrag_jax.runtime.whole_files import write_json

SMOLLM2 = "smollm2"  # in config.model.path: SmolLM2-135M-Instruct
SMOLLM2_FOLDER = "QRAG_SMOLLM2"  # the variable that names its folder
SMOLLM2_CACHE = Path("~/.cache/qrag_jax/models/SmolLM2-135M-Instruct")
FOLDER = "model"  # of a tiny model, in the run's folder
START, END = "<|im_start|>", "<|im_end|>"
# As in Qwen3's tokenizer these are single tokens, but a decoded text keeps them.
_TAGS = ("tool_call", "tool_response", "think")
TAGS = tuple(f"<{slash}{name}>" for name in _TAGS for slash in ("", "/"))
# Each turn is rendered by itself, so a longer conversation begins with the text of a shorter one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content']"
    " + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_WEIGHTS = "config.model.tiny.weights"
# A capitalised word | a blank and a word | one digit | a blank and signs | one white space.
# A word may have underscores, as the names of tools and arguments have.
_WORDS = (
    r"\p{Lu}[\p{L}\p{M}_]*"
    r"| ?[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}][\p{L}\p{M}_]*"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s"
)


@dataclasses.dataclass(frozen=True)
class ModelAdaptersConfig(pretrained.LoraConfig):
    """Section `model.lora`."""

    alpha: Positive = 32.0  # an adapter's product is scaled by alpha / r
    dropout: float = internal(0.0)


@dataclasses.dataclass(frozen=True)
class TinyLMConfig:
    """Section `model.tiny`: sizes of a tiny language model, by default 1.77 million weights."""

    layers: Count = 4  # transformer layers
    hidden: Count = 192  # width of a hidden state
    heads: Count = 6  # query heads
    key_heads: Count = 2  # heads of keys and values, which share the query heads evenly
    head_dim: Count = 32  # width of a head
    intermediate: Count = 512  # width inside a feed-forward
    # most tokens of the vocabulary; the word table is also the head
    vocab: Annotated[int, least(258 + len(TAGS))] = 1024
    positions: Count = 1024  # longest row, in tokens
    # θ of the rotation; a large one lets far places be compared
    rope_theta: Annotated[float, least(1)] = 1e8
    # FILE.py:FUNCTION(params, config, seed) that changes the random weights; it has no sandbox
    weights: str = ""

    def __post_init__(self) -> None:
        if self.heads % self.key_heads or self.head_dim % 2:
            raise InputError(
                f"config.model.tiny.heads is {self.heads}, key_heads {self.key_heads}, head_dim "
                f"{self.head_dim}; heads must be a multiple of key_heads, head_dim even."
            )
        if self.weights:
            own_code.check_form(self.weights, _WEIGHTS)


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """Section `model`."""

    # Folder or hub name of a chat model; "smollm2": see `make llm`; "": the tiny one below
    path: str = ""
    # of the computation: float32, bfloat16; auto: the faster one here
    dtype: Annotated[str, one_of(NAMES)] = AUTO
    # float32, bfloat16; auto: as dtype, but float32 on CPU
    activations: Annotated[str, one_of(NAMES)] = AUTO
    # recomputed for gradients: none, layers, dots (all but dot products)
    remat: Annotated[str, one_of(REMAT_POLICIES)] = "none"
    block_tokens: Natural = 0  # tokens computed at a time; 0: 2048 on CPU, else 16384
    # Turns of thinking, by the chat template's option enable_thinking: on, off; "": as it has it
    thinking: Annotated[str, one_of(("", "on", "off"))] = ""
    lora: ModelAdaptersConfig = dataclasses.field(default_factory=ModelAdaptersConfig)
    tiny: TinyLMConfig = dataclasses.field(default_factory=TinyLMConfig)

    def tokens(self, platform: Platform) -> int:
        """Tokens that are computed at a time."""
        return self.block_tokens or (2048 if platform.on_cpu else 16384)


def load_language_model(
    folder: Path, config: LanguageModelConfig | None = None, *, platform: Platform | None = None
) -> pretrained.LoadedLanguageModel:
    """Reads the folder of a causal language model.

    Args:
        config: how it computes (None: by the defaults, in float32); its `path` is not read.
        platform: the devices that compute; None: those of this process.
    """
    config = config or LanguageModelConfig(dtype=FLOAT32)
    fields = pretrained.load_fields(folder, DECODERS, config, platform)
    sizes = fields["trunk"].config
    tokenizer = read_fast_tokenizer(folder)
    pretrained.check_vocabulary(folder, len(tokenizer), sizes.vocab_size)
    stop_ids = _stop_ids(folder, fields["model_config"])
    model = LanguageModel(fields["trunk"], stop_ids, sizes.longest_row)
    return pretrained.LoadedLanguageModel(model=model, folder=folder, tokenizer=tokenizer, **fields)


def save_language_model(
    loaded: pretrained.LoadedLanguageModel, params: Params, tokenizer_files_from: Path, out: Path
) -> None:
    """Writes a folder that Hugging Face's model class opens; see `weight_names.save_folder`."""
    config = loaded.model_config | {"tie_word_embeddings": not loaded.trunk.own_head}
    save_folder(loaded.table, params, config, tokenizer_files_from, out)


def _stop_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a turn: those of generation_config.json, else of config.json."""
    path = folder / GENERATION
    eos = (read_json(path) if path.is_file() else {}).get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return check_value(tuple[Natural, ...], ids, f"{folder}: eos_token_id")


def named_folder(path: str) -> Path:
    """The folder of a model that a config names."""
    if path != SMOLLM2:
        return resolve_folder(path)
    folder = Path(os.environ.get(SMOLLM2_FOLDER) or SMOLLM2_CACHE).expanduser()
    if not (folder / "config.json").exists():
        raise InputError(
            f"config.model.path is {SMOLLM2!r}, and {folder} holds no model; get it by make llm "
            f"(or python examples/smollm2.py), or set {SMOLLM2_FOLDER} to its folder."
        )
    return folder


def prepare_language_model(
    config: LanguageModelConfig,
    workdir: Path,
    texts: Callable[[], Iterable[str]],
    seed: int,
    *,
    platform: Platform | None = None,
) -> pretrained.LoadedLanguageModel:
    """The model of the run in `workdir`, and its first adapters, which change no output yet.

    The tokenizer of a tiny model is trained on `texts`; `seed` is that of all that is random.
    """
    if config.path:
        folder = named_folder(config.path)
    else:
        folder = workdir / FOLDER
        if not (folder / "config.json").exists():
            hosts.first_does(lambda: write_tiny_lm(folder, texts(), config.tiny, seed=seed))
    loaded = load_language_model(folder, config, platform=platform)
    if (sizes := config.lora.sizes) is not None:
        adapters = pretrained.new_adapters(loaded.table, loaded.trunk, sizes, seed)
        model = dataclasses.replace(loaded.model, lora_scale=sizes.scale)
        loaded = dataclasses.replace(loaded, model=model, adapters=adapters)
    if not loaded.tokenizer.chat_template:
        raise InputError(f"{folder}: the tokenizer has no chat template; add chat_template.jinja.")
    return loaded


def write_tiny_lm(
    folder: Path, texts: Iterable[str], config: TinyLMConfig | None = None, *, seed: int
) -> None:
    """Writes a folder that `load_language_model` and Hugging Face's classes open.

    The same texts, sizes and seed give the same bytes. Few texts may give fewer tokens than
    `config.vocab`; the weights have as many as there are.
    """
    config, change = config or TinyLMConfig(), None
    if config.weights:  # before anything is written
        change = own_code.load(config.weights, _WEIGHTS, ("params", "config", "seed")).function
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer(texts, config.vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": config.positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / GENERATION, {"eos_token_id": end})
    sizes = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_heads,
        intermediate_size=config.intermediate,
        head_dim=config.head_dim,
        max_position_embeddings=config.positions,
        rope_theta=config.rope_theta,
        tie_word_embeddings=True,
    )
    params = jax.tree.map(np.asarray, jax.jit(Transformer(sizes).init_params)(jax.random.key(seed)))
    if change is not None:
        params = change(params=params, config=sizes, seed=seed)
    fields = dataclasses.asdict(sizes) | {"eos_token_id": end}
    fields["rms_norm_eps"] = fields.pop("layer_norm_eps")
    del fields["scaling"], fields["type_vocab_size"]
    save_folder(DECODERS["qwen3"], params, fields, folder, folder)


def trained_tokenizer(texts: Iterable[str], vocab: int) -> tokenizers.Tokenizer:
    """A byte-level BPE. Ids: the bytes, then what is learnt, then the marks of turns and tags."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 2 - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer
