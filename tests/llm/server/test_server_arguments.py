"""Arguments that are handed on to vLLM, and in how many ways one could try to hand on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.server.server_arguments import check_arguments
from qrag_jax.llm.server.server_config import ServerConfig


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--enforce-eager --seed 3",
        "--tensor-parallel-size 2 --max-num-seqs=64",
        "--max_num_seqs 64 --no-enable-prefix-caching --enable_chunked_prefill",
        "--max-logprobs -1",
        '--default-chat-template-kwargs {"enable_thinking":false}',
        "--distributed-executor-backend mp",
    ],
)
def test_handed_on(words: str, model_folder: Path) -> None:
    arguments = tuple(words.split())
    assert ServerConfig(str(model_folder), arguments=arguments).arguments == arguments
    check_arguments(("--enable-scale-out", *arguments), publish=True)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        # In all the ways in which an argument can be written.
        ("--host 0.0.0.0", "--host"),
        ("--ho=::", "--ho"),
        ("--api_key=abc", "api_key_env"),
        ("--api-k=abc", "api_key_env"),
        ("--trust_remote_code", "--trust_remote_code"),
        ("--tru", "--trust-remote-code"),
        ("--config more.yaml", "--config"),
        ("--middleware os.system", "--middleware"),
        ("--kv-transfer-config.kv_connector_module_path=x", "--kv-transfer-config"),
        ("--distributed-executor-backend my.code", "my.code"),
        ("--distributed_executor_backend=my.code", "my.code"),
        ("--", "holds --"),
        # Other fields' business.
        ("--max_model_len=5", "config.llm.server.max_model_len"),
        ("--no-enable-lora", "config.llm.server.lora_rank"),
        ("--dt half", "config.llm.server.dtype"),
        ("--enable-scale-out", "config.llm.server.publish"),
        # Short names, single dashes, words that belong to nothing: one would be the model.
        ("-tp 2", "-tp"),
        ("-O3", "-O3"),
        ("-host ::", "-host"),
        ("somebody/elses-model", "somebody/elses-model"),
        ("--seed 3 x/y", "x/y"),
        ("--seed=3 x/y", "x/y"),
    ],
)
def test_refused(words: str, names: str, model_folder: Path) -> None:
    with pytest.raises(InputError, match=names) as caught:
        ServerConfig(str(model_folder), arguments=tuple(words.split()))
    assert str(caught.value).startswith("config.llm.server.arguments")
    assert "abc" not in str(caught.value)  # of a key


def test_what_is_no_text_is_refused(model_folder: Path) -> None:
    with pytest.raises(InputError, match="3 is no text"):
        ServerConfig(str(model_folder), arguments=(3,))  # type: ignore[arg-type]
