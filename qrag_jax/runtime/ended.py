"""A training that a system ends before its last step, on purpose."""

from __future__ import annotations


class EndedEarly(Exception):
    """Why; the message is one sentence for the user. The run is saved, and no error."""
