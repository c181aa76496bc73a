"""Shares of what scripted demonstrations do: that they sum to 1, and draws by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qrag_jax.data.scripted import Draw
from qrag_jax.errors import InputError, check_least

_FINE = 1 << 53
_BEYOND = 1e-6  # how far from 1 a sum of shares may be


def check_shares(section: str, settings: object, names: Iterable[str]) -> None:
    """Refuses shares that are below 0 or do not sum to 1.

    Args:
        section: the config section that holds the shares, such as "styles".
        settings: the object that holds the values.
        names: its fields that are the shares of one decision.
    """
    *most, last = names
    check_least(section, settings, **dict.fromkeys((*most, last), 0.0))
    total = sum(getattr(settings, name) for name in (*most, last))
    if not abs(total - 1) <= _BEYOND:
        raise InputError(
            f"config.{section}.{', '.join(most)} and {last} sum to {total:g}; change them so that "
            "they sum to 1."
        )


def drawn(shares: Mapping[str, float], draw: Draw) -> str:
    """One of the names, with its share as its probability.

    Args:
        shares: name → share; `check_shares` has passed them.
        draw: one number of it is used.
    """
    return name_at(shares, drawn_point(draw))


def drawn_point(draw: Draw) -> float:
    """A point in [0, 1), for `name_at`; one number of the draw is used."""
    return draw.below(_FINE) / _FINE


def name_at(shares: Mapping[str, float], point: float) -> str:
    """The name whose part of [0, 1) has this point; the parts lie in the order of the names."""
    possible = [name for name, share in shares.items() if share > 0]
    for name in possible[:-1]:
        point -= shares[name]
        if point < 0:
            return name
    return possible[-1]
