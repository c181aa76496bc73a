"""The one exception for what a user got wrong; every room may raise it."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input, told in one sentence that names the file, the field and the fix.

    Entry points print the message alone (no traceback) and exit with status 2.
    """
