"""Arguments that are handed on to vLLM, and in how many ways one could try to hand on others."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.server.server_arguments import check_arguments
from qrag_jax.llm.server.server_config import ServerConfig

GOOD = [
    (),
    ("--enforce-eager",),
    ("--enforce-eager", "--seed", "3"),
    ("--tensor-parallel-size", "2", "--max-num-seqs=64"),
    ("--max_num_seqs", "64"),
    ("--quantization", "fp8", "--kv-cache-dtype=fp8"),
    ("--no-enable-prefix-caching", "--enable_chunked_prefill"),
    ("--max-logprobs", "-1"),
    ("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    ("--distributed-executor-backend", "mp"),
]

BAD = [
    # What must not be there, in all the ways in which it can be written.
    (("--host", "0.0.0.0"), "holds --host; the server stays on 127.0.0.1"),  # noqa: S104
    (("--host=::",), "holds --host; the server stays on"),
    (("--hos", "0.0.0.0"), "holds --hos, which vLLM may take for --host; only whole"),  # noqa: S104
    (("--ho=::",), "holds --ho, which vLLM may take for --host"),
    (("--uds", "/tmp/x"), "holds --uds; the server stays on"),  # noqa: S108
    (("--api-key=abc",), r"holds --api-key; every user .* in config\.llm\.api_key_env"),
    (("--api_key", "abc"), "holds --api_key; every user"),
    (("--api-k=abc",), "holds --api-k, which vLLM may take for --api-key"),
    (("--trust-remote-code",), r"runs code .* start vLLM with it yourself.*config\.llm\.url"),
    (("--trust_remote_code",), "runs code"),
    (("--trust-remote",), "which vLLM may take for --trust-remote-code;"),
    (("--tru",), "--trust-remote-code or --trust-request-chat-template"),
    (("--config", "more.yaml"), "holds --config; a file of arguments could hold any"),
    (("--config=more.yaml",), "holds --config; a file of arguments"),
    (("--conf", "more.yaml"), "which vLLM may take for --config"),
    (("--middleware", "os.system"), "holds --middleware; it runs code"),
    (("--tool-parser-plugin=x.py",), "runs code"),
    (("--worker-cls", "x.Y"), "runs code"),
    (("--allowed-local-media-path", "/"), "reads or writes files"),
    (("--trust-request-chat-template",), "a template of their own; start vLLM"),
    # Other fields' business.
    (("--max_model_len=5",), r"set config\.llm\.server\.max_model_len instead"),
    (("--model", "x/y"), r"set config\.llm\.server\.model instead"),
    (("--no-enable-lora",), r"set config\.llm\.server\.lora_rank instead"),
    (("--max-loras", "3"), r"set config\.llm\.server\.loaded_adapters instead"),
    (("--max_cpu_loras=3",), r"set config\.llm\.server\.loaded_adapters instead"),
    (("--logprobs-mode", "raw_logprobs"), r"set config\.llm\.server\.publish instead"),
    (("--dt", "half"), "which vLLM may take for --dtype"),
    # Short names, single dashes, words that belong to nothing: vLLM would take one for the model.
    (("-tp", "2"), "holds -tp; write its whole name, --tensor-parallel-size"),
    (("-tp=2",), "write its whole name, --tensor-parallel-size"),
    (("-q", "fp8"), "write its whole name, --quantization"),
    (("-O3",), "holds -O3; write its whole name, --optimization-level"),
    (("-h",), "holds -h; write whole names, each with two dashes"),
    (("-host", "::"), "holds -host; write whole names"),
    (("somebody/elses-model",), "'somebody/elses-model' is the value of no argument before it"),
    (("--enforce-eager", "x/y"), "'x/y' is the value of no argument before it"),
    (("--seed", "3", "x/y"), "'x/y' is the value of no argument before it"),
    (("",), "'' is the value of no argument"),
    (("--",), "holds --, which is not handed on"),
    # Values.
    (("--seed",), "--seed stands without its value"),
    (("--seed", "--host=::"), "--seed stands without its value"),
    (("--chat-template", "-host"), "--chat-template stands without its value"),
    (("--enforce-eager=yes",), "--enforce-eager takes no value"),
    (("--distributed-executor-backend", "my.code"), "is 'my.code'; use mp, uni, ray"),
    (("--enable-scale-out",), r"needs config\.llm\.server\.publish=True"),
    # Parts of a value, and what is not known.
    (("--hf-overrides.auto_map.x=y",), "holds --hf-overrides.auto_map.x, which is not handed on"),
    (("--seed.x", "1"), "only whole names"),
    (("--speculative-config", "{}"), r"not handed on; start vLLM with it yourself"),
    (("--Host", "::"), "not handed on"),
    ((3,), "3 is no text; write it in quotes"),
]


@pytest.mark.parametrize("arguments", GOOD, ids=" ".join)
def test_handed_on(arguments: tuple[str, ...], model_folder: Path) -> None:
    config = ServerConfig(str(model_folder), arguments=arguments)
    assert config.arguments == arguments
    check_arguments(("--enable-scale-out", *arguments), publish=True)


@pytest.mark.parametrize(
    ("arguments", "says"), BAD, ids=[" ".join(map(str, words)) or "''" for words, _ in BAD]
)
def test_refused(arguments: tuple[str, ...], says: str, model_folder: Path) -> None:
    with pytest.raises(InputError, match=says) as caught:
        ServerConfig(str(model_folder), arguments=arguments)
    assert str(caught.value).startswith("config.llm.server.arguments")
    assert "abc" not in str(caught.value)  # of a key


def test_nothing_that_passes_is_the_beginning_of_something_else() -> None:
    """argparse, which vLLM uses, takes what passes for nothing but itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    for name in ("--host", "--api-key", "--trust-remote-code", "--config", "--port"):
        parser.add_argument(name, default="as it was", nargs="?")
    untouched = vars(parser.parse_args([]))
    for arguments in GOOD:
        known, _ = parser.parse_known_args([word for word in arguments if word.startswith("--")])
        assert vars(known) == untouched
