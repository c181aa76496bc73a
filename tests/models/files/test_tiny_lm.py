"""A tiny language model from scratch: as in Hugging Face, and with names that can be copied."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.errors import InputError
from qrag_jax.models.files.tiny_lm import END, START, TAGS, TinyLMConfig, write_tiny_lm
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, load_language_model

ROOT = Path(__file__).parents[3]
SIZES = TinyLMConfig(layers=2, hidden=24, heads=4, key_heads=2, head_dim=8, intermediate=32)
TALK = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "Who founded Blorn Mills?"},
    {"role": "assistant", "content": '<tool_call>\n{"name": "complete"}\n</tool_call>'},
    {"role": "tool", "content": "Document ID: 3\nBlorn Mills is old."},
    {"role": "tool", "content": "Nothing found."},
    {"role": "assistant", "content": "Yes."},
]


def texts(count: int = 60) -> list[str]:
    questions = [bridge_question(0, "train", i) for i in range(count)]
    return [text for q in questions for text in (q.question, *(p.text for p in q.passages))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_lm(folder, iter(texts()), SIZES, seed=1)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedLanguageModel:
    return load_language_model(folder)


def ids_of(loaded: LoadedLanguageModel, text: str) -> list[int]:
    return loaded.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_folder_holds_the_sizes_asked_for(folder: Path, loaded: LoadedLanguageModel) -> None:
    config = loaded.model.trunk.config
    assert config.vocab_size == len(loaded.tokenizer) == 1024
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (2, 24, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.intermediate_size, config.max_position_embeddings) == (32, 1024)
    assert loaded.model.stop_ids == tuple(ids_of(loaded, END))
    assert loaded.model.max_positions == 1024
    assert not loaded.model.trunk.own_head
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    assert 0.08 < tensors["model.embed_tokens.weight"].std() < 0.12


def test_it_begins_with_heads_that_copy_unless_told_otherwise(tmp_path: Path) -> None:
    once = np.random.default_rng(0).integers(0, 1024, 40)
    again = jnp.asarray(np.tile(once, 2)[None], jnp.int32)
    copied = {}
    for copies in (True, False):
        folder = tmp_path / str(copies)
        write_tiny_lm(folder, texts(), TinyLMConfig(copies=copies), seed=1)
        fresh = load_language_model(folder)
        assert fresh.model.trunk.config.rope_theta == 1e8
        logits = fresh.model.logits(fresh.params, again, jnp.array([again.shape[1]]))
        found = logits.argmax(axis=-1)
        copied[copies] = int((found[0, 40:-1] == again[0, 41:]).sum())
    assert copied[True] >= 30
    assert copied[False] <= 1


def test_the_default_has_as_many_weights_as_stated(tmp_path: Path) -> None:
    write_tiny_lm(tmp_path, texts(), seed=0)
    sizes = [tensor.size for tensor in load_file(tmp_path / "model.safetensors").values()]
    assert 1.76e6 < sum(sizes) < 1.78e6


def test_marks_are_single_tokens(loaded: LoadedLanguageModel) -> None:
    for mark in (START, END, *TAGS):
        assert len(ids_of(loaded, mark)) == 1
        assert len(ids_of(loaded, f"a {mark}\nb")) == len(ids_of(loaded, "a \nb")) + 1
    said = TALK[2]["content"]
    # Text is decoded without the marks of turns, and must still show the calls.
    assert loaded.tokenizer.decode(ids_of(loaded, said + END), skip_special_tokens=True) == said


def test_any_text_is_kept(loaded: LoadedLanguageModel) -> None:
    for text in ('Zürich  is\t"old";\n\n日本 of 1871? Ǆ a\u0301 ', "", *texts()[:30]):
        assert loaded.tokenizer.decode(ids_of(loaded, text)) == text


def test_a_name_is_the_same_tokens_everywhere(loaded: LoadedLanguageModel) -> None:
    for i in range(20):
        question = bridge_question(0, "dev", i)  # no name of it is in the texts
        for name in (question.entity, question.bridge, question.answer):
            own = ids_of(loaded, name)
            for before, after in ((" ", "."), ('"', '"}'), ("\n", " works"), ("(", "?")):
                around = ids_of(loaded, before + name + after)
                assert any(around[j : j + len(own)] == own for j in range(len(around)))


def test_the_chat_template_is_append_only(loaded: LoadedLanguageModel) -> None:
    def rendered(messages: list[dict[str, str]], opens: bool = False) -> str:
        return loaded.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opens
        )

    for count in range(1, len(TALK)):
        whole, more = rendered(TALK[:count]), rendered(TALK[: count + 1])
        assert more.startswith(whole)
        if TALK[count]["role"] == "assistant":
            said = TALK[count]["content"]
            assert more == rendered(TALK[:count], opens=True) + said + END + "\n"
    assert rendered(TALK[:4], opens=True) == (
        "<|im_start|>system\nUse the tools.<|im_end|>\n"
        "<|im_start|>user\nWho founded Blorn Mills?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "complete"}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nDocument ID: 3\nBlorn Mills is old.\n"
        "</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_logits_are_those_of_hugging_face(folder: Path, loaded: LoadedLanguageModel) -> None:
    torch = pytest.importorskip("torch", reason="Hugging Face's model needs torch")
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat: Any = tokenizer.apply_chat_template(TALK, return_dict=True)
    ids = chat["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.generation_config.eos_token_id == loaded.model.stop_ids[0]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    tokens, lengths = jnp.asarray([ids]), jnp.asarray([len(ids)])
    logits = jax.jit(loaded.model.logits)(loaded.params, tokens, lengths)[0]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert expected.std() > 0.01


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.models.files.test_tiny_lm import *; "
        "write_tiny_lm(pathlib.Path(sys.argv[1]), texts(), SIZES, seed=int(sys.argv[2])); "
        "assert 'torch' not in sys.modules"
    )
    for seed in (1, 2):
        out = tmp_path / str(seed)
        subprocess.run([sys.executable, "-c", code, str(out), str(seed)], check=True, cwd=ROOT)
        for path in folder.iterdir():
            same = (out / path.name).read_bytes() == path.read_bytes()
            assert same == (seed == 1 or path.name != "model.safetensors"), path.name
        assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}


def test_few_texts_give_a_small_vocabulary(tmp_path: Path) -> None:
    write_tiny_lm(tmp_path, ["a"], SIZES, seed=0)
    loaded = load_language_model(tmp_path)
    count = 256 + 2 + len(TAGS)
    assert len(loaded.tokenizer) == loaded.model.trunk.config.vocab_size == count
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"key_heads": 4}, "heads is 6; it must be a multiple"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"vocab": 200}, "vocab is 200; it must be at least 264"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"layers": 1}, r"config\.model\.tiny\.copies is True, and heads that copy take 2 layers"),
        ({"hidden": 8}, r"config\.model\.tiny\.copies is True"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5; it must be at least 1"),
    ],
)
def test_sizes_that_are_refused(given: dict[str, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        dataclasses.replace(TinyLMConfig(), **given)
