"""Checks the arguments that a config passes on to vLLM against a list of harmless ones.

vLLM also accepts prefixes of names (`--hos`), underscores for dashes, short names (`-tp`), parts of
values (`--name.key`), a file of further arguments, and the model's name without an option. So only
full names from this list are accepted, each with as many words as it takes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qrag_jax.errors import InputError
from qrag_jax.llm.listener import HOST

FIELD = "config.llm.server.arguments"

# Arguments with a value: how the model is loaded, spread over devices, cached and scheduled.
_WITH_VALUE = (
    "attention-backend",
    "block-size",
    "chat-template",
    "chat-template-content-format",
    "cpu-offload-gb",
    "data-parallel-size",
    "default-chat-template-kwargs",
    "distributed-executor-backend",
    "download-dir",
    "generation-config",
    "kv-cache-dtype",
    "kv-cache-memory-bytes",
    "load-format",
    "lora-dtype",
    "max-log-len",
    "max-logprobs",
    "max-num-batched-tokens",
    "max-num-seqs",
    "max-parallel-loading-workers",
    "num-gpu-blocks-override",
    "optimization-level",
    "override-generation-config",
    "pipeline-parallel-size",
    "quantization",
    "reasoning-parser",
    "revision",
    "scheduling-policy",
    "seed",
    "swap-space",
    "tensor-parallel-size",
    "tokenizer-mode",
    "tokenizer-revision",
    "uvicorn-log-level",
)
# Switches without a value; they may begin with "no-".
_SWITCHES = (
    "async-scheduling",
    "calculate-kv-scales",
    "disable-cascade-attn",
    "disable-custom-all-reduce",
    "disable-log-requests",
    "disable-log-stats",
    "disable-sliding-window",
    "disable-uvicorn-access-log",
    "enable-chunked-prefill",
    "enable-expert-parallel",
    "enable-prefix-caching",
    "enforce-eager",
    "fully-sharded-loras",
    "language-model-only",
    "use-tqdm-on-load",
)
# It opens endpoints that take token ids and tell the version of each span of an answer.
_WITH_PUBLISH = "enable-scale-out"
# Values allowed for an argument that could also name Python code to run.
_CHOICES = {"distributed-executor-backend": ("mp", "uni", "ray")}

# Arguments that other fields of the section set.
_FIELDS = {
    "model": "model",
    "served-model-name": "name",
    "port": "port",
    "gpu-memory-utilization": "memory_share",
    "max-model-len": "max_model_len",
    "dtype": "dtype",
    "enable-lora": "lora_rank",
    "max-lora-rank": "lora_rank",
    "max-loras": "loaded_adapters",
    "max-cpu-loras": "loaded_adapters",
    "logprobs-mode": "publish",
}
_STAYS = f"the server stays on {HOST}"
_RUNS_CODE = "it runs code from files that nobody has looked at"
_READS = "with it the server reads or writes files that it is told of"
# Why arguments that users may look for are refused; all others are refused too.
_REASONS = {
    "host": _STAYS,
    "uds": _STAYS,
    "api-key": "every user of the machine can read it there; name its environment variable in "
    "config.llm.api_key_env",
    "config": "a file of arguments could hold any; write them here one by one",
    "trust-remote-code": _RUNS_CODE,
    "middleware": _RUNS_CODE,
    "logits-processors": _RUNS_CODE,
    "tool-parser-plugin": _RUNS_CODE,
    "reasoning-parser-plugin": _RUNS_CODE,
    "tool-server": _RUNS_CODE,
    "worker-cls": _RUNS_CODE,
    "worker-extension-cls": _RUNS_CODE,
    "allowed-local-media-path": _READS,
    "log-config-file": _READS,
    "trust-request-chat-template": "whoever asks could bring a template of their own",
}
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
    "-O": "optimization-level",
}
_ELSE = "start vLLM with it yourself, and give that server's config.llm.url"
_NEGATIVE = re.compile(r"-\d+(\.\d+)?")


def check_arguments(arguments: Sequence[object], publish: bool) -> None:
    """Checks that all arguments may be passed on to vLLM.

    Args:
        arguments: one word each, such as `("--seed", "3")` or `("--seed=3",)`.
        publish: whether weights are handed over while the server runs.

    Raises:
        InputError: an argument is refused; the message names it, the reason and what to do instead.
    """
    words: list[str] = []
    for word in arguments:
        if not isinstance(word, str):
            raise InputError(f"{FIELD}: {word!r} is no text; write it in quotes.")
        words.append(word)
    at = 0
    while at < len(words):
        written, equals, value = words[at].partition("=")
        at += 1
        name = _checked_name(written, publish)
        if name in _WITH_VALUE:
            if not equals:
                if at == len(words) or _is_name(words[at]):
                    raise InputError(f"{FIELD}: {written} stands without its value.")
                value = words[at]
                at += 1
            choices = _CHOICES.get(name)
            if choices and value not in choices:
                raise InputError(f"{FIELD}: {written} is {value!r}; use {', '.join(choices)}.")
        elif equals:
            raise InputError(f"{FIELD}: {written} takes no value; write it alone.")


def _is_name(word: str) -> bool:
    return word.startswith("-") and not _NEGATIVE.fullmatch(word)


def _checked_name(written: str, publish: bool) -> str:
    """The argument's name without its leading dashes; refuses what may not be passed on."""
    if not written.startswith("--"):
        whole = next((name for short, name in _SHORT.items() if written.startswith(short)), "")
        if whole:
            raise InputError(f"{FIELD} holds {written}; write its whole name, --{whole}.")
        if written.startswith("-"):
            raise InputError(f"{FIELD} holds {written}; write whole names, each with two dashes.")
        raise InputError(f"{FIELD}: {written!r} is the value of no argument before it; remove it.")
    name = written[2:].replace("_", "-")
    if name in _WITH_VALUE or name.removeprefix("no-") in _SWITCHES:
        return name
    if name == _WITH_PUBLISH:
        if publish:
            return name
        raise InputError(f"{FIELD} holds {written}; it needs config.llm.server.publish=True.")
    base = name.partition(".")[0]
    if field := _FIELDS.get(base.removeprefix("no-")):
        raise InputError(f"{FIELD} holds {written}; set config.llm.server.{field} instead.")
    if reason := _REASONS.get(base.removeprefix("no-")):
        instead = "" if "config.llm" in reason or reason in (_STAYS, _REASONS["config"]) else _ELSE
        raise InputError(f"{FIELD} holds {written}; {reason}{'; ' if instead else ''}{instead}.")
    known = (*_WITH_VALUE, *_SWITCHES, *_FIELDS, *_REASONS)
    if base and (meant := [each for each in known if each.startswith(base)]):
        those = " or ".join(f"--{each}" for each in sorted(meant))
        raise InputError(
            f"{FIELD} holds {written}, which vLLM may take for {those}; only whole names are "
            "handed on."
        )
    raise InputError(f"{FIELD} holds {written}, which is not handed on; {_ELSE}.")
