"""A hook of MkDocs (`mkdocs.yml`): pages that are written from the code when the site is built.

commands.md has the help of every command, fields.md the config fields of every system,
contributing.md is CONTRIBUTING.md, and notebook.md shows the cells of notebook.ipynb.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from qrag_jax.__main__ import COMMANDS
from qrag_jax.runtime.config_fields import described
from qrag_jax.systems import SYSTEMS

ROOT = Path(__file__).resolve().parents[1]
FIELDS = "\nFields of the experiment"  # what follows in a help is on the page of fields


def commands() -> str:
    lines = [
        "# Commands",
        "`qrag NAME --flag=value …` is `python -m qrag_jax.NAME --flag=value …`. Commands that "
        "read a run or a config also take [config fields](fields.md), `--config.FIELD=VALUE`.",
    ]
    for name, what in COMMANDS.items():
        done = subprocess.run(  # noqa: S603  (our own commands)
            [sys.executable, "-m", "qrag_jax", name, "--help"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        text = done.stdout.partition(FIELDS)[0].strip()
        lines += [f"## qrag {name}", f"{what[0].upper()}{what[1:]}.", f"```text\n{text}\n```"]
    return "\n\n".join(lines) + "\n"


def fields() -> str:
    lines = [
        "# Config fields",
        "`--config.FIELD=VALUE` sets a field on the command line; a config file sets it in Python. "
        "Defaults are those of the system; `qrag train --config=FILE --help` prints the values of "
        "a config, and which fields it does not read.",
    ]
    for name in SYSTEMS:
        config = importlib.import_module(f"qrag_jax.systems.{name}.config").CONFIG
        lines.append(f"## {name}")
        section = None
        for field, value, comment in described(config, ""):
            first = field.partition(".")[0] if "." in field else ""
            if first != section:
                section = first
                lines.append(f"### {name}: {first or 'top level'}")
                lines.append("| field | default | |\n| --- | --- | --- |")
            comment, default = (cell(text) for text in (comment, repr(value)))
            lines[-1] += f"\n| `{field}` | <code>{default}</code> | {comment} |"
    return "\n\n".join(lines) + "\n"


def contributing() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


def notebook() -> str:
    """The cells of notebook.ipynb, which itself can be downloaded."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ("".join(one["source"]) for one in cells)
    return "\n\n".join(
        text if one["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for one, text in zip(cells, texts, strict=True)
    )


def cell(text: str) -> str:
    """A text in a table, as it is."""
    for character in "&<>|*_`[]\\":
        text = text.replace(character, f"&#{ord(character)};")
    return " ".join(text.split())


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for written in (commands, fields, contributing, notebook):
        name = f"{written.__name__}.md"
        files.append(File.generated(config, name, content=written()))
    return files
