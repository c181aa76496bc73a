"""A model server whose turns are written beforehand: python -m benchmarks.peers.turn_server FILE.

The file is a JSON object: `seconds` that an answer takes, `mark`, a token that stands before each
tool's result, and `turns`, for each number of such marks in the prompt the tokens of an answer, or
of several, of which the seed chooses one. It takes adapters, and does nothing with them. It prints
its port, then serves, with as little as HTTP allows, so that a benchmark measures its clients.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

_LOG_PROB = -1.0


class TurnProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, told: dict[str, Any], names: dict[str, None]) -> None:
        self._data, self._told, self._names = b"", told, names

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport that replies go to."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Replies to every complete request."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n") + 4) > 3:
            head, length = self._data[:end], 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            if len(self._data) < end + length:
                return
            body, self._data = self._data[end : end + length], self._data[end + length :]
            self._reply(head.split(b" ")[1].decode(), json.loads(body) if body else {})

    def _reply(self, path: str, body: dict[str, Any]) -> None:
        status, reply, wait = "200 OK", {}, 0.0
        if path == "/v1/models":
            reply = {"data": [{"id": name} for name in self._names]}
        elif path == "/v1/load_lora_adapter":
            self._names[body["lora_name"]] = None
        elif path == "/v1/unload_lora_adapter":
            self._names.pop(body["lora_name"])
        elif path == "/v1/completions":
            reply, wait = self._turn(body), self._told["seconds"]
        else:
            status = "404 Not Found"
        content = json.dumps(reply).encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        message = head.encode() + content
        asyncio.get_running_loop().call_later(wait, self._transport.write, message)

    def _turn(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = self._told["turns"][body["prompt"].count(self._told["mark"])]
        ids = choices[body["seed"] % len(choices)]
        log_probs = {"tokens": [""] * len(ids), "token_logprobs": [_LOG_PROB] * len(ids)}
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop"}
        return {"model": body["model"], "choices": [{**choice, "logprobs": log_probs}]}


async def _serve(told: dict[str, Any]) -> None:
    names = {"base": None}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TurnProtocol(told, names), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(Path(sys.argv[1]).read_text())))
