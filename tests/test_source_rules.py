"""The sources: imports go down the floors, pinned versions fit, every refusal names something."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.entry_points import ROOT

PACKAGE = ROOT / "qrag_jax"
# Lowest first; a room may import from the floors below its own, and from itself.
FLOORS = (
    {"errors", "algorithms"},
    {"runtime"},
    {"metrics", "data", "llm"},
    {"models", "retrieval", "environments"},
    {"policies", "feedback", "serving"},
    {"rollouts"},
    {"learners"},
    {"evaluators"},
    {"systems"},
    {"integrations"},
)
COMMANDS = len(FLOORS)  # modules at the top of the package
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """`qrag_jax.data.sources` is of `data`; a module at the top is a room of its own."""
    return module.split(".")[1]


def imported(source: str) -> set[str]:
    """All modules that the text imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            at_top = node.module == "qrag_jax"
            found |= {f"qrag_jax.{alias.name}" for alias in node.names} if at_top else {node.module}
    return found


def climbs(module: str, source: str) -> list[str]:
    """The imports of a module that go up, or to another room of its floor."""
    room = room_of(module)
    level = LEVEL.get(room, COMMANDS)
    return sorted(
        f"{module} imports {name}"
        for name in imported(source)
        if name.startswith("qrag_jax.")
        and room_of(name) != room
        and LEVEL.get(room_of(name), COMMANDS) >= level
    )


def test_imports_go_down() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= LEVEL.keys()
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")
    }
    assert [line for name, text in modules.items() for line in climbs(name, text)] == []
    outside = {
        name
        for module, text in modules.items()
        if room_of(module) == "algorithms"
        for name in imported(text)
        if name.split(".")[0] not in ("jax", "qrag_jax", *sys.stdlib_module_names)
    }
    assert outside == set()  # formulas know JAX alone


def test_an_arrow_up_or_sideways_is_found() -> None:
    assert climbs("qrag_jax.rollouts.a", "def f():\n    from qrag_jax.learners import b") != []
    assert climbs("qrag_jax.data.a", "import qrag_jax.llm.endpoint") != []
    assert climbs("qrag_jax.train", "from qrag_jax import evaluate") != []


def test_pinned_versions_have_hashes_no_address_and_fit_the_package() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    # As pip reads it: a backslash joins a line with the next.
    lines = text.replace("\\\n", " ").splitlines()
    entries = [line.partition(" --") for line in lines if line.strip() and line[0] != "#"]
    pinned = {canonicalize_name(Requirement(n).name): Requirement(n) for n, _, _ in entries}
    for name, _, options in entries:
        (only,) = Requirement(name).specifier
        assert only.operator == "=="
        digests = f"--{options}".split()
        assert digests
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in digests), name
    assert "://" not in text
    assert not re.search(r"^\s*-", re.sub(r"^ +--hash=\S+", "", text, flags=re.M), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for needed in map(Requirement, project["dependencies"]):
        there = pinned[canonicalize_name(needed.name)]
        (only,) = there.specifier
        assert needed.specifier.contains(only.version), needed
        assert there.marker is None  # on every system


# ---------------------------------------------------------------- messages

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
