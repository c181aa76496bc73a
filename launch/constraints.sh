#!/usr/bin/env bash
# Writes constraints.txt: the base install, for every system and Python, in the versions that are in
# .venv now, with the hashes of their files. Its first lines stay.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' >"$folder/tested.txt"
.venv-lock/bin/uv pip compile pyproject.toml --constraint="$folder/tested.txt" --generate-hashes \
    --universal --python-version=3.11 --no-header --no-annotate --quiet --output-file="$folder/locked.txt"
grep '^#' constraints.txt | cat - "$folder/locked.txt" >"$folder/constraints.txt"
cp "$folder/constraints.txt" constraints.txt
