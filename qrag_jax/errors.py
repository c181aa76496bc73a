"""Errors that users can act on, and the checks of settings that raise them."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """Bad input, told in one sentence that names the file, the field and the fix.

    Commands print the message alone (no traceback) and exit with status 2.
    """


def check_least(section: str, settings: object, **least: float) -> None:
    """Refuses fields of `settings` that are too low.

    Args:
        section: where the fields are in a config, such as "train".

    Raises:
        InputError: names the field.
    """
    for name, low in least.items():
        value = getattr(settings, name)
        if not value >= low:
            raise InputError(f"config.{section}.{name} is {value}; it must be at least {low}.")


def check_known(section: str, settings: object, name: str, known: Iterable[str]) -> None:
    """Refuses a name that is not one of `known`.

    Raises:
        InputError: names the field, and those there are.
    """
    value, known = getattr(settings, name), tuple(known)
    if value not in known:
        raise InputError(f"config.{section}.{name} is {value!r}; use one of {', '.join(known)}.")
