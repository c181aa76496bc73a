"""A model server that echoes prompts: python -m benchmarks.speed.echo_server.

It prints its port, then serves. It does as little as HTTP allows, so that its clients are measured.
"""

from __future__ import annotations

import asyncio
import json


class EchoProtocol(asyncio.Protocol):
    """One connection; replies to a chat request with the content of its last message."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport that replies go to."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Replies to every complete request."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n") + 4) > 3:
            length = 0
            for line in self._data[:end].lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            if len(self._data) < end + length:
                return
            body, self._data = self._data[end : end + length], self._data[end + length :]
            self._transport.write(_reply(body))


def _reply(body: bytes) -> bytes:
    message = {"role": "assistant", "content": "OK"}
    if body:
        message["content"] = json.loads(body)["messages"][-1]["content"]
    reply = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "echo",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
    }
    data = json.dumps(reply if body else {"object": "list", "data": [{"id": "echo"}]}).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(EchoProtocol, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
