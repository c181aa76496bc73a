"""A small random Llama, written as GGUF with rows permuted as llama.cpp does, and turned back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from qrag_jax.errors import InputError
from qrag_jax.models.files.gguf import GGUFFile, read_gguf
from qrag_jax.models.files.gguf_llama import write_llama_folder
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.runtime.digests import sha256
from tests.models.files.test_gguf import finish

LAYERS, HEADS, KEY_HEADS, HEAD, WIDTH, INNER = 2, 4, 2, 6, 24, 40
SPECIAL = ("<|end|>", "<|turn|>")
ADDED = "<think>"
MERGES = ["a b", "ab c", "Ġ a", "1 2"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), ADDED]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}<|end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def torch_llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        intermediate_size=INNER,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows: entry i of a head's first half, then entry i of its second."""
    rows, half = [], weight.shape[0] // heads // 2
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            rows += [weight[start + i], weight[start + half + i]]
    return np.stack(rows)


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    theirs = {name: value.detach().numpy() for name, value in model.named_parameters()}
    found = {
        "token_embd.weight": theirs["model.embed_tokens.weight"],
        "output_norm.weight": theirs["model.norm.weight"],
    }
    if "lm_head.weight" in theirs:
        found["output.weight"] = theirs["lm_head.weight"]
    heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}
    for i in range(LAYERS):
        for name, there in NAMES.items():
            weight = theirs[f"model.layers.{i}.{name}.weight"]
            mixed = neighbours(weight, heads[there]) if there in heads else weight
            found[f"blk.{i}.{there}.weight"] = mixed
    return found


def fields() -> dict[str, Any]:
    """The metadata; a test changes it."""
    types = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4]
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KEY_HEADS,
        "llama.rope.dimension_count": HEAD,
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def written(
    path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "llama"
) -> GGUFFile:
    writer = gguf.GGUFWriter(path, kind)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in fields.items():
        adders.get(type(value), writer.add_array)(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    finish(writer)
    return read_gguf(path, sha256(path))


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_holds_the_model_that_was_written(tied: bool, tmp_path: Path) -> None:
    model = torch_llama(tied)
    out = tmp_path / "out"
    write_llama_folder(written(tmp_path / "a.gguf", fields(), gguf_tensors(model)), out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(theirs.state_dict()[name], value, err_msg=name)
    kept = set(model.config.to_dict()) - {"architectures", "transformers_version", "dtype"}
    ids = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    expected = {name: model.config.to_dict()[name] for name in kept} | ids
    expected["_name_or_path"] = theirs.config.to_dict()["_name_or_path"]
    assert {name: theirs.config.to_dict()[name] for name in kept} == expected
    assert json.loads((out / "generation_config.json").read_text()) == ids
    loaded = load_language_model(out)
    assert loaded.model.stop_ids == (0,)
    assert loaded.model.trunk.own_head != tied
    chat = [{"role": "user", "content": "abc 12"}]
    ids_of = loaded.tokenizer.get_vocab()
    pieces = ["<|turn|>", "abc", "Ġ", "1", "2", "<|end|>"]  # digits are not merged
    text = loaded.tokenizer.apply_chat_template(chat, tokenize=False)
    assert loaded.tokenizer.encode(text) == [ids_of[piece] for piece in pieces]
    text = "<|end|> <think>ä ab"
    ids = loaded.tokenizer.encode(text)
    assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == text.removeprefix("<|end|>")
    assert loaded.tokenizer.eos_token == SPECIAL[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"llama.block_count": None}, r"the field llama\.block_count, of type int, is missing"),
        ({"llama.embedding_length": "24"}, r"the field llama\.embedding_length, of type int"),
        ({"llama.block_count": 1}, r"blk\.1\..* has no place, and 8 more\.$"),
        ({"llama.block_count": 3}, r"blk\.2\..* is missing, and 8 more\.$"),
        ({"llama.feed_forward_length": 8}, r"ffn_\w+\.weight has shape .*, expected .*"),
        ({"tokenizer.ggml.model": "llama"}, r"a tokenizer of the kind \('llama', 'smollm'\)"),
        ({"tokenizer.ggml.pre": "qwen2"}, r"only byte-level ones .* one of smollm"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, "tokens, 262 different ones"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 types of tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "its merges make no tokenizer"),
        ({"tokenizer.ggml.merges": ["a"]}, "its merges make no tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "marks token 9999, but has 263 tokens"),
        ({"tokenizer.chat_template": None}, r"the field tokenizer\.chat_template"),
    ],
)
def test_what_does_not_fit_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {name: value for name, value in (fields() | changed).items() if value is not None}
    source = written(tmp_path / "a.gguf", given, gguf_tensors(torch_llama(True)))
    with pytest.raises(InputError, match=rf"a\.gguf: .*{message}"):
        write_llama_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_architecture(tmp_path: Path) -> None:
    source = written(tmp_path / "a.gguf", fields(), {}, "gemma")
    with pytest.raises(InputError, match="holds a model of type 'gemma', not 'llama'"):
        write_llama_folder(source, tmp_path / "out")
