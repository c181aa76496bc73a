"""Copies the modules of qrag_jax that the package stands on into `musique_multihop.core`.

They import no third package but NumPy, bm25s and PyStemmer, and no JAX. One source, so that the
rewards are the same. A source release has the copies already.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ENTRIES = (
    "qrag_jax.data.dataset_parts",
    "qrag_jax.data.generators.bridge_world",
    "qrag_jax.environments.tools.bridge_tasks",
    "qrag_jax.environments.tools.documents",
    "qrag_jax.environments.tools.play",
    "qrag_jax.feedback.rubric",
    "qrag_jax.retrieval.bm25",
)
FOLDERS = ("qrag_jax/llm/text/templates",)
OURS, THEIRS = "qrag_jax", "musique_multihop.core"


class CustomBuildHook(BuildHookInterface):
    """See hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Makes the copies before a build."""
        root = Path(self.root).resolve().parents[1]
        if (root / OURS / "errors.py").exists():
            copy_core(root, Path(self.root) / "src" / "musique_multihop" / "core")


def copy_core(root: Path, core: Path) -> None:
    """Copies all modules that the entries import, whatever imports them."""
    shutil.rmtree(core, ignore_errors=True)
    left, seen = [*ENTRIES], set[str]()
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        source = _file(root, module)
        text = source.read_text(encoding="utf-8")
        left += _imports(root, text)
        target = core / source.relative_to(root / OURS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace(f"{OURS}.", f"{THEIRS}."), encoding="utf-8")
    for folder in FOLDERS:
        shutil.copytree(root / folder, core / Path(folder).relative_to(OURS), dirs_exist_ok=True)
    for folder in {path.parent for path in core.rglob("*.py")} | {core}:
        for each in (folder, *folder.parents):
            if each == core.parent:
                break
            (each / "__init__.py").touch()


def _imports(root: Path, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                found.append(inside if _file(root, inside).exists() else node.module)
    return [module for module in found if module != OURS]


def _file(root: Path, module: str) -> Path:
    path = root / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
