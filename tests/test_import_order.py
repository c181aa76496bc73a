"""Imports go down the floors only, and rooms of one floor do not know each other."""

import ast

import pytest

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
    """`qrag_jax.data.sources.niah` is of `data`; a module at the top is a room of its own."""
    return module.split(".")[1]


def imported(source: str) -> set[str]:
    """All `qrag_jax` modules that the text imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            at_top = node.module == "qrag_jax"
            found |= {f"qrag_jax.{alias.name}" for alias in node.names} if at_top else {node.module}
    return {name for name in found if name.startswith("qrag_jax.")}


def climbs(module: str, source: str) -> list[str]:
    """The imports of a module that go up, or to another room of its floor."""
    room = room_of(module)
    level = LEVEL.get(room, COMMANDS)
    return sorted(
        f"{module} imports {name}"
        for name in imported(source)
        if room_of(name) != room and LEVEL.get(room_of(name), COMMANDS) >= level
    )


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")
}


def test_every_room_has_a_floor() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= LEVEL.keys()


@pytest.mark.parametrize("room", sorted({room_of(name) for name in MODULES}))
def test_imports_go_down(room: str) -> None:
    found = [
        line
        for name, path in MODULES.items()
        if room_of(name) == room
        for line in climbs(name, path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_an_arrow_up_is_found() -> None:
    """The check itself: up, sideways, inside of functions; down and within a room are fine."""
    text = "def f():\n    from qrag_jax.learners import step\n"
    assert climbs("qrag_jax.rollouts.chunks", text) == [
        "qrag_jax.rollouts.chunks imports qrag_jax.learners"
    ]
    assert climbs("qrag_jax.data.tokens", "import qrag_jax.llm.endpoint") != []
    assert climbs("qrag_jax.data.tokens", "from qrag_jax import train") != []
    assert climbs("qrag_jax.data.tokens", "from qrag_jax.data import sample") == []
    assert climbs("qrag_jax.train", "from qrag_jax import systems") == []
    assert climbs("qrag_jax.train", "from qrag_jax import evaluate") != []


def test_the_floor_of_formulas_knows_jax_alone() -> None:
    outside = {
        (path.name, name)
        for path in (PACKAGE / "algorithms").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if name.split(".")[0] not in ("jax", "__future__", "typing", "collections", "qrag_jax")
    }
    assert outside == set()
