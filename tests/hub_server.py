"""A small hub on this machine: what huggingface_hub asks of it to make a repository and commit."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.json_server import Call, listening

OWNER_KEY = "hf_secretOfThisTest"


@dataclasses.dataclass
class Hub:
    """One repository and its server.

    Attributes:
        url: the server's address.
        token: opens it.
        made: the fields with which the repository was made; None: there is none.
        files: path → content of the last commit.
        stored: SHA-256 → content of large files.
        message: of the last commit.
        asked: method and path of every request.
        refuse: (status, words) with which commits are refused; None: they are taken.
    """

    url: str = ""
    token: str = OWNER_KEY
    made: dict[str, Any] | None = None
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    stored: dict[str, bytes] = dataclasses.field(default_factory=dict)
    message: str = ""
    asked: list[str] = dataclasses.field(default_factory=list)
    refuse: tuple[int, str] | None = None

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of a request."""
        self.asked.append(f"{method} {path}")
        if path == "/api/repos/create":
            if self.made is not None:
                return 409, {"error": "You already created this model repo", "url": self._page()}
            self.made = json.loads(body)
            return 200, {"url": self._page()}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            return 200, {"files": modes}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/store/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.startswith("/store/"):
            self.stored[path.removeprefix("/store/")] = body
            return 200, {}
        if "/commit/" in path:
            if self.refuse is not None:
                return self.refuse[0], {"error": self.refuse[1]}
            return 200, self._commit([json.loads(line) for line in body.splitlines()])
        if re.match(r"/api/models/[^/]+/[^/]+/tree/", path):
            return 200, [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in self.files.items()
            ]
        if method == "GET" and path.startswith("/api/models/") and self.made is not None:
            siblings = [{"rfilename": name} for name in self.files]
            private = self.made.get("visibility") == "private" or bool(self.made.get("private"))
            return 200, {"id": self._name(), "private": private, "siblings": siblings}
        return 404, {"error": f"no {path}"}

    def _commit(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.message = value["summary"]
            elif line["key"] == "file":
                assert value["encoding"] == "base64"
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del self.files[value["path"]]
        url = f"{self._page()}/commit/{'0' * 40}"
        return {"success": True, "commitOid": "0" * 40, "commitUrl": url}

    def _name(self) -> str:
        assert self.made is not None
        return f"{self.made['organization']}/{self.made['name']}"

    def _page(self) -> str:
        return f"{self.url}/{self._name()}"


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """A hub that serves while the block runs."""
    hub = Hub()

    def answer(call: Call) -> tuple[int, Any]:
        path = call.path.partition("?")[0]
        allowed = call.headers.get("Authorization") == f"Bearer {hub.token}"
        if allowed or path.startswith("/store/"):
            return hub.answer(call.method, path, call.body)
        return 401, {"error": "Invalid username or password."}

    with listening(answer) as hub.url:
        yield hub
