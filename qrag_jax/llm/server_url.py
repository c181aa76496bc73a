"""The addresses of servers, and their API keys, which come from the environment alone."""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.parse

from qrag_jax.errors import InputError


def check_url(url: str, field: str, example: str, key: str) -> urllib.parse.SplitResult:
    """The parts of a server's URL, which has a scheme, a host and perhaps a port and a path.

    Args:
        field: names the URL in errors.
        example: a URL that is usable.
        key: what a key is given through, since it cannot be in the URL; "": the server wants none.
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


# Many keys are letters and digits alone, some of them small; so a name with small letters is not
# taken, and nothing else repeats what may be the key itself.
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
BLOTTED = "[the API key]"
_SHORTEST = 16  # a shorter one could be part of an honest answer


def check_variable(name: str, field: str) -> None:
    """Checks that `name` can be an environment variable's, in capitals; "" means no variable."""
    if name and not VARIABLE.fullmatch(name):
        raise InputError(
            f"{field} is no name of an environment variable in capital letters; export the key "
            "under a name such as LLM_API_KEY and give that name."
        )


def read_key(name: str, field: str) -> str:
    """The key in the environment variable `name`, stripped of white space; "" if `name` is ""."""
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        raise InputError(
            f"{field} names the environment variable {name}, which is not set; export it with the "
            "server's key (for a server of our own, any secret)."
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InputError(
            f"the environment variable {name} holds characters that no API key has; export it "
            "again."
        )
    return key


def without_key(text: str, key: str) -> str:
    """The text of an answer, in which a server repeats the key, without it.

    A short key is left where it is: it could be a word of the answer.
    """
    return text.replace(key, BLOTTED) if len(key) >= _SHORTEST else text
