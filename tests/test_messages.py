"""Every refusal of the package is one line that names what it is about."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.entry_points import ROOT

# A flag, a field or an argument, a call, a file or a value in quotes; or what a request holds.
NAMES = re.compile(r"--\w|\w+\.\w|\w=|\w\(|\w/\w|'[\w\[]|\b(question|query|passage|corpus)\b")


def refusals() -> Iterator[tuple[str, ast.expr]]:
    """The place and the message of each `InputError` that is made."""
    for path in sorted((ROOT / "qrag_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("InputError"):
                assert node.args, f"{path}, line {node.lineno}: an InputError says nothing"
                yield f"{path}, line {node.lineno}", node.args[0]


def test_messages_are_one_line_and_name_what_they_are_about() -> None:
    found = list(refusals())
    assert len(found) > 100
    for place, message in found:
        parts = [part for part in ast.walk(message) if isinstance(part, ast.Constant)]
        text = "".join(str(part.value) for part in parts)
        assert "\n" not in text, place
        if isinstance(message, ast.Constant):
            assert text.strip(), place
            assert NAMES.search(text), f"{place}: {text}"
        elif isinstance(message, ast.JoinedStr):
            assert any(isinstance(part, ast.FormattedValue) for part in message.values), place
