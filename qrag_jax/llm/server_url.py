"""The addresses of servers: usable ones, without keys in them."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse

from qrag_jax.errors import InputError


def check_url(url: str, field: str, example: str, key: str) -> urllib.parse.SplitResult:
    """The parts of a server's URL, which has a scheme, a host and perhaps a port and a path.

    Args:
        field: names the URL in errors.
        example: a URL that is usable.
        key: what a key is given through, since it cannot be in the URL; "": the server wants none.

    Raises:
        InputError: it is no such URL, or it has a password, a query or a fragment; the message
            shows none of these.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # for example, the port is not a number
        usable = False
    if not usable or re.search(r"\s", url):
        # The part before an @ may be a password.
        raise InputError(f"{field} is {url.rpartition('@')[2]!r}; give a server such as {example}.")
    if "@" in parts.netloc or parts.query or parts.fragment:
        fix = f"give a key through {key}" if key else f"give only those, as in {example}"
        raise InputError(f"{field} has more than server and path ({parts.hostname}); {fix}.")
    return parts


def is_local(url: str) -> bool:
    """Whether the server is on this machine, so that no proxy is needed."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
