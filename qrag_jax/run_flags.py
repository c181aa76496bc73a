"""Flags of the commands that read a trained run: which run, which checkpoint, its config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_collections
from absl import flags
from ml_collections import config_flags

from qrag_jax import saved_config
from qrag_jax.encoder_settings import fill_from_saved
from qrag_jax.errors import InputError


def workdir() -> Path:
    """The run's folder."""
    return Path(flags.FLAGS.workdir)


def checkpoint() -> str:
    """Which of its checkpoints: "best" or "last"."""
    return flags.FLAGS.checkpoint


def checkpoint_is_given() -> bool:
    """Whether the command line says which checkpoint."""
    return bool(flags.FLAGS["checkpoint"].present)


def _argument(argv: Sequence[str], name: str) -> str | None:
    """The value of `--name=value` or `--name value`, read before absl knows the config."""
    for i, word in enumerate(argv):
        flag, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == name:
            return value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return None


def define(argv: Sequence[str]) -> None:
    """Defines the flags; `--config` is the run's saved config, updated by `--eval_config`.

    Called by commands as they start, not on import: train.py has a `--workdir` of its own.
    """
    flags.DEFINE_string("workdir", None, "Folder of a trained run.")
    flags.DEFINE_enum("checkpoint", "best", ["best", "last"], "Which checkpoint.")
    flags.DEFINE_string("eval_config", None, "Config FILE whose fields replace the run's.")
    folder = _argument(argv, "workdir")
    if {"--help", "-h", "--helpfull"} & set(argv):
        return
    if folder is None:
        raise InputError("give the folder of a trained run, for example --workdir=runs/hotpotqa.")
    config = saved_config.load_config(Path(folder) / "config.json")
    if file := _argument(argv, "eval_config"):
        _replace_fields(config, file)
    config_flags.DEFINE_config_dict("config", config, lock_config=True)


def _replace_fields(config: ml_collections.ConfigDict, file: str) -> None:
    """Puts the fields of the config `file` into `config`; the sources as one whole."""
    parser = config_flags.config_flags.ConfigFileFlagParser(name="eval_config")
    try:
        fields, saved = parser.parse(file), config.copy_and_resolve_references()
        if "sources" in fields.get("data", {}):
            del config.data.sources
            config.data.sources = fields.data.sources
        config.lock().update(fields)
        fill_from_saved(config, saved)  # a whole experiment given as FILE leaves it open
        saved_config.draw_as(config, saved)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[-1].strip().removeprefix("ValueError: ")
        raise InputError(f"--eval_config={file}: {reason}") from None
