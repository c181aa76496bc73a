"""Scores given texts by verifiers' own evaluation, without qrag_jax: python replay.py, JSON in.

Standard input: id, arguments, and episodes, each a split, a task and the model's texts.
Standard output, last line: the rewards.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


async def of_v1(asked: dict[str, Any]) -> list[float]:
    """By `Env.run_slot` with the client of evaluations, against a chat server with these texts."""
    import importlib

    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.env import RunSlot
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils import loaders

    sys.modules["qrag_direct_harness"] = importlib.import_module("direct")
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "qrag_direct_harness"}}
    cls = loaders.environment_class(asked["id"])
    config_cls = loaders.concrete_type(cls, loaders.EnvConfig, origin=loaders.Env)
    fields = {"taskset": {"id": asked["id"], **asked["arguments"]}, "agent": agent}
    environment = loaders.load_environment((config_cls or loaders.EnvConfig).model_validate(fields))
    tasks, found = [*environment.taskset], []
    os.environ["REPLAY_API_KEY"] = "none"
    async with environment.serving():
        for episode in asked["episodes"]:
            with _ChatServer(episode["texts"]) as url:
                client = EvalClientConfig(base_url=url, api_key_var="REPLAY_API_KEY")
                context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
                done = await environment.run_slot(RunSlot(tasks[episode["task"]]), context)
            found.append(float(done.traces[0].reward))
    return found


class _ChatServer:
    """Answers chat completions by texts, one after the other."""

    def __init__(self, texts: list[str]) -> None:
        left = iter(texts)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                message = {"role": "assistant", "content": next(left)}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                reply = {
                    "id": "0",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "policy",
                    "choices": [choice],
                    "usage": usage,
                }
                data = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def main() -> None:
    """Reads what is asked, and writes the rewards."""
    asked = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    rewards = asyncio.run(of_v1(asked))
    print(json.dumps(rewards), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
