"""GGUF: tensors by the format's definition, and a Llama with rows permuted as llama.cpp does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

from qrag_jax.errors import InputError
from qrag_jax.models.files.gguf import GGUFFile, read_gguf
from qrag_jax.models.files.gguf_llama import write_llama_folder
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.runtime.digests import sha256
from tests.support.small_models import torch_decoder

ROWS, BLOCK = 3, 32  # a row holds two blocks
BYTES = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}  # of a block


def half(data: bytes) -> float:
    return float(np.frombuffer(data, "<f2")[0])


def definition(block: bytes, kind: Kind) -> list[float]:
    """The values of a block, one at a time, as ggml's documentation of the format has them."""
    if kind == Kind.Q8_0:
        return [half(block[:2]) * number for number in np.frombuffer(block[2:], "i1")]
    low = half(block[2:4]) if kind == Kind.Q4_1 else -8 * half(block[:2])
    packed = block[-16:]  # the low halves of the bytes come first, then the high ones
    numbers = [byte % 16 for byte in packed] + [byte // 16 for byte in packed]
    return [half(block[:2]) * number + low for number in numbers]


def random_blocks(kind: Kind) -> np.ndarray:
    draw = np.random.default_rng(int(kind))
    blocks = draw.integers(0, 256, (ROWS * 2, BYTES[kind]), dtype=np.uint8)
    scales = 2 if kind == Kind.Q4_1 else 1
    blocks[:, : 2 * scales] = draw.normal(size=(ROWS * 2, scales)).astype("<f2").view(np.uint8)
    return blocks


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes the file of what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with one tensor of each kind, and fields of several types."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_uint32("a.count", 7)
    writer.add_array("a.words", ["ä", "", "x y"])
    writer.add_array("a.numbers", [3, -1, 2])
    for kind in BYTES:
        data = random_blocks(kind).reshape(ROWS, -1)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    plain = np.random.default_rng(0).normal(size=(ROWS, 5))
    writer.add_tensor("F32", plain.astype(np.float32))
    writer.add_tensor("F16", plain.astype(np.float16))
    finish(writer)
    return tmp_path / "small.gguf"


def test_tensors_and_fields(small: Path) -> None:
    found = read_gguf(small, sha256(small))
    for kind in BYTES:
        expected = [definition(block.tobytes(), kind) for block in random_blocks(kind)]
        assert found.shape(kind.name) == (ROWS, 2 * BLOCK)
        tensor = found.tensor(kind.name)
        assert tensor.dtype == np.float32
        np.testing.assert_allclose(tensor, np.reshape(expected, (ROWS, -1)), rtol=1e-6, atol=1e-6)
    plain = np.random.default_rng(0).normal(size=(ROWS, 5))
    np.testing.assert_array_equal(found.tensor("F32"), plain.astype(np.float32))
    np.testing.assert_array_equal(found.tensor("F16"), plain.astype(np.float16).astype(np.float32))
    assert found.field("a.words", list) == ["ä", "", "x y"]
    assert found.field("a.numbers", list) == [3, -1, 2]
    assert found.field("a.count", int) == 7
    for name, kind in {"a.count": str, "a.nothing": int}.items():
        with pytest.raises(InputError, match=rf"small\.gguf: .*{name}"):
            found.field(name, kind)


def test_another_file_is_refused_before_it_is_read(small: Path, tmp_path: Path) -> None:
    # An array of 2**40 numbers in a file of 44 bytes: the reader itself would not come back.
    huge = b"GGUF" + b"".join(
        number.to_bytes(size, "little")
        for number, size in [(3, 4), (0, 8), (1, 8), (1, 8), (65, 1), (9, 4), (0, 4), (2**40, 8)]
    )
    (tmp_path / "huge.gguf").write_bytes(huge)
    for name in ("huge.gguf", "absent.gguf"):
        with pytest.raises(InputError, match=name):
            read_gguf(tmp_path / name, sha256(small))


@pytest.mark.parametrize("kept", [0, 3, 60, 200, -8])
def test_a_broken_file_of_that_digest(small: Path, kept: int) -> None:
    small.write_bytes(small.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"small\.gguf"):
        read_gguf(small, sha256(small))


def test_a_kind_that_cannot_be_dequantised(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("whole", np.zeros((2, 2), np.int32))
    finish(writer)
    found = read_gguf(tmp_path / "a.gguf", sha256(tmp_path / "a.gguf"))
    with pytest.raises(InputError, match=r"a\.gguf: whole .*I32"):
        found.tensor("whole")


# ---------------------------------------------------------------------- a Llama

LAYERS, HEADS, KEY_HEADS, HEAD, WIDTH, INNER = 2, 4, 2, 6, 24, 40
SPECIAL = ("<|end|>", "<|turn|>")
ADDED = "<think>"
MERGES = ["a b", "ab c", "Ġ a", "1 2"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *LETTERS, *(merge.replace(" ", "") for merge in MERGES), ADDED]
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
    return torch_decoder(
        "llama",
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        head_dim=HEAD,
        intermediate_size=INNER,
        attention_bias=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
        eos_token_id=0,
    )


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


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"llama.block_count": None}, "llama.block_count"),
    ({"llama.embedding_length": "24"}, "llama.embedding_length"),
    ({"llama.block_count": 1}, "blk.1."),
    ({"llama.block_count": 3}, "blk.2."),
    ({"llama.feed_forward_length": 8}, "ffn_"),
    ({"tokenizer.ggml.model": "llama"}, "llama"),
    ({"tokenizer.ggml.pre": "qwen2"}, "qwen2"),
    ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, "tokens"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "types"),
    ({"tokenizer.ggml.merges": ["a zz"]}, "merges"),
    ({"tokenizer.ggml.merges": ["a"]}, "merges"),
    ({"tokenizer.ggml.eos_token_id": 9999}, "9999"),
    ({"tokenizer.chat_template": None}, "tokenizer.chat_template"),
]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(torch_llama(True))
    for changed, named in UNFIT:
        given = {name: value for name, value in (fields() | changed).items() if value is not None}
        source = written(tmp_path / "a.gguf", given, tensors)
        with pytest.raises(InputError, match=r"a\.gguf: ") as caught:
            write_llama_folder(source, tmp_path / "out")
        assert named in str(caught.value)
        assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="gemma"):
        write_llama_folder(written(tmp_path / "a.gguf", fields(), {}, "gemma"), tmp_path / "out")
