"""Refuses arguments for vLLM that other fields set, that open the server, or that run code.

The config of a run that somebody else has trained is data, and may name any. vLLM also takes the
beginning of a name (`--hos`), underscores for dashes, parts of values (`--name.key`), and a word
without an option for the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from qrag_jax.errors import InputError
from qrag_jax.llm.listener import HOST

FIELD = "config.llm.server.arguments"
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
_HERE = f"the server stays on {HOST}"
_CODE = "it runs code from files that nobody has looked at"
_READS = "with it the server reads or writes files that others name"
_REFUSED = {
    "host": _HERE,
    "uds": _HERE,
    "api-key": "every user of the machine can read it there; use config.llm.api_key_env",
    "config": "a file of arguments could hold any; write them here one by one",
    "trust-remote-code": _CODE,
    "middleware": _CODE,
    "logits-processors": _CODE,
    "io-processor-plugin": _CODE,
    "tool-parser-plugin": _CODE,
    "reasoning-parser-plugin": _CODE,
    "tool-server": _CODE,
    "worker-cls": _CODE,
    "worker-extension-cls": _CODE,
    "kv-transfer-config": _CODE,
    "ec-transfer-config": _CODE,
    "scheduler-cls": _CODE,
    "allowed-local-media-path": _READS,
    "log-config-file": _READS,
    "trust-request-chat-template": "whoever asks could bring a template of their own",
}
# It could name a class of a module, too.
_EXECUTOR, _EXECUTORS = "distributed-executor-backend", ("mp", "uni", "ray")
_WITH_PUBLISH = "enable-scale-out"  # opens endpoints that take token ids


def check_arguments(arguments: Sequence[object], publish: bool) -> None:
    """Checks that all arguments may be passed on to vLLM.

    Args:
        arguments: one word each, such as `("--seed", "3")` or `("--seed=3",)`.
        publish: whether weights are handed over while the server runs.

    Raises:
        InputError: an argument is refused; the message names it, the reason and what to do instead.
    """
    option = ""  # that the next word may be the value of
    for word in arguments:
        if not isinstance(word, str):
            raise InputError(f"{FIELD}: {word!r} is no text; write it in quotes.")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            _check_name(word.partition("=")[0], name, publish)
            option = "" if equals else name
            if not equals:
                continue
        elif not option or (word.startswith("-") and not word[1:2].isdigit()):
            raise InputError(
                f"{FIELD} holds {word!r}, which is neither a whole name with two dashes nor the "
                "value of one."
            )
        else:
            name, value, option = option, word, ""
        if _EXECUTOR.startswith(name) and value not in _EXECUTORS:
            raise InputError(f"{FIELD}: {name} is {value!r}; use {', '.join(_EXECUTORS)}.")


def _check_name(written: str, name: str, publish: bool) -> None:
    base = name.partition(".")[0].removeprefix("no-")
    if name == _WITH_PUBLISH and not publish:
        raise InputError(f"{FIELD} holds {written}; it needs config.llm.server.publish=True.")
    for known, field in _FIELDS.items():
        if known.startswith(base):
            raise InputError(f"{FIELD} holds {written}; set config.llm.server.{field} instead.")
    for known, reason in _REFUSED.items():
        if known.startswith(base):
            raise InputError(
                f"{FIELD} holds {written}, for --{known}; {reason}. Else start vLLM yourself, and "
                "give its config.llm.url."
            )
