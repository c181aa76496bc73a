"""Links that leave a folder are refused; those that stay in it are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.file_names import check_links


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("passages.jsonl", "../secret"),
        ("passages.jsonl", "../folder-of-another/secret"),  # begins like the folder's own name
        ("inner/deep", "/etc"),
        ("gone", "../nothing-there"),
        ("circle", "circle"),
    ],
)
def test_links_out_of_the_folder_are_refused(name: str, target: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "folder-of-another").mkdir()
    for path in ("secret", "folder-of-another/secret"):
        (tmp_path / path).write_text("mine alone")
    (folder / name).symlink_to(target)
    with pytest.raises(InputError, match=f"{name} is a link out of .*; put the file itself there"):
        check_links(folder)


def test_links_within_it_and_to_it_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("a")
    (folder / "b").symlink_to("a")
    (folder / "c").symlink_to(folder / "a")
    (tmp_path / "link").symlink_to(folder)
    check_links(folder)
    check_links(tmp_path / "link")
