"""Command lines: flags into a config, and bad input into one sentence with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

from qrag_jax.errors import InputError

BAD_INPUT = 2


def run(main: Callable[[], int]) -> None:
    """Parses the flags, runs `main` and exits with its status.

    An unknown `--config.field`, a value of the wrong type and every `InputError` print one
    sentence, without a traceback, and exit with 2.
    """
    app.run(lambda _argv: _main_or_sentence(main), flags_parser=parse_flags)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags as absl does; leaves with one sentence when they are wrong."""
    try:
        rest = flags.FLAGS(list(argv))
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        _leave(_first_sentence(error))
    if len(rest) > 1:
        _leave(f"unexpected argument {rest[1]!r}; options are written --name=value.")
    return rest


def _main_or_sentence(main: Callable[[], int]) -> int:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells every rename at INFO
    try:
        return main()
    except InputError as error:
        _leave(str(error))


def _first_sentence(error: Exception) -> str:
    text = str(error.args[0]) if error.args else str(error)
    return " ".join(text.split("\n")[0].split())


def _leave(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(BAD_INPUT)
