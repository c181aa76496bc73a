"""Keeps Orbax's warnings from programs that read checkpoints: they tell of what is meant."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


def _is_other(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or "orbax" not in record.pathname


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Drops what Orbax logs within, up to warnings: that nothing will be written, for example.

    Commands log nothing of it anyway; this is for programs that load a run by themselves. What
    absl logs for others, and Orbax's errors, are logged as before.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_is_other)
    try:
        yield
    finally:
        logger.removeFilter(_is_other)
