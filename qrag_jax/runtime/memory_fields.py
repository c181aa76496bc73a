"""Which fields of an experiment's config make its programs need less of a device's memory."""

from __future__ import annotations

from collections.abc import Mapping

_MESH = "more devices along fsdp (--config.runtime.mesh)"


def _encoder(*own: str) -> tuple[str, ...]:
    return (
        "a lower --config.encoder.block_tokens",
        "--config.encoder.remat=layers",
        *own,
        "--config.encoder.lora.rank above 0",
        _MESH,
    )


def _language_model(*own: str) -> tuple[str, ...]:
    return (
        "a lower --config.model.block_tokens",
        "--config.model.remat=layers",
        "a lower --config.sampling.rows",
        "a lower --config.sampling.room",
        *own,
        "--config.model.lora.rank above 0",
        _MESH,
    )


# config.system → what needs less, the cheapest first; the first of them change no result.
SAVING: Mapping[str, tuple[str, ...]] = {
    "q_rag": _encoder(
        "a higher --config.train.accumulation",
        "a lower --config.eval.batch_size",
        "a lower --config.train.batch_size",
    ),
    "harr": _encoder("a lower --config.state.max_tokens", "a lower --config.train.batch_size"),
    "rlvr": _language_model("a lower --config.tools.turn_tokens"),
    "leret": _language_model(
        "a lower --config.preference.batch_size", "a lower --config.sft.batch_size"
    ),
    "deepretrieval": _language_model("a lower --config.train.batch_size"),
}
WITHOUT_CONFIG = ("a smaller model", "more devices")


def saving(system: str | None) -> str:
    """What needs less memory, as the beginning of a sentence: "…, … or … needs less".

    Args:
        system: field `system` of the config; None: the command has no config.
    """
    *names, last = SAVING.get(system or "", WITHOUT_CONFIG)
    return f"{', '.join(names)} or {last} needs less"
