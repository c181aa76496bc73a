"""The client as callers use it: order, bounds, threads, cancelling, and what it keeps secret."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from qrag_jax.llm.outcomes import Answer, CompletionRequest, Failure
from tests.llm.asking import MakeClient, chat, eventually, texts
from tests.llm.model_server import Call, ModelServer, Reply

CHILD = """
import sys
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.outcomes import ChatRequest
client = Client(ClientConfig(url=sys.argv[1], model="tiny"))
print(client.ask_blocking([ChatRequest((("user", "hello"),))])[0].text)
assert "jax" not in sys.modules and "torch" not in sys.modules
future = client.submit([ChatRequest((("user", "never answered"),))])
"""


def test_many_answers_keep_their_order(server: ModelServer, make_client: MakeClient) -> None:
    delays = random.Random(0)
    server.script = lambda call: Reply(delay=delays.random() * 0.02)
    prompts = [f"question {index}" for index in range(400)]
    client = make_client(concurrency=24)
    assert texts(client.ask_blocking(list(map(chat, prompts)))) == [f"echo: {p}" for p in prompts]
    assert len(server.calls) == 400
    assert 12 <= server.most_at_once <= 24
    assert server.connections <= 25  # they are used again


def test_what_the_server_is_sent(server: ModelServer, make_client: MakeClient) -> None:
    client = make_client(version="step 3")
    answers = client.ask_blocking(
        [
            chat("hello there", temperature=0.7, seed=5, top_p=0.9, extra={"top_k": 3}),
            CompletionRequest("once upon", max_tokens=7, log_probs=True),
            CompletionRequest((1, 2, 3)),
        ]
    )
    bodies = {call.path: dict(call.body) for call in server.calls if call.prompt != [1, 2, 3]}
    messages = [{"role": "system", "content": "Echo."}, {"role": "user", "content": "hello there"}]
    drawn = {"temperature": 0.7, "max_tokens": 256, "seed": 5, "top_p": 0.9, "top_k": 3}
    greedy = {"temperature": 0.0, "max_tokens": 7, "logprobs": 1}
    assert bodies == {
        "/v1/chat/completions": {"model": "tiny", "messages": messages} | drawn,
        "/v1/completions": {"model": "tiny", "prompt": "once upon"} | greedy,
    }
    assert [1, 2, 3] in [call.prompt for call in server.calls]
    assert texts(answers) == ["echo: hello there", "echo: once upon", "echo: [1, 2, 3]"]
    assert all(isinstance(a, Answer) and a.version == "step 3" for a in answers)


def test_identical_requests_in_flight_are_asked_once(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.script = lambda call: Reply(delay=0.3)
    client = make_client()
    greedy = client.submit([chat("same"), chat("other"), chat("same"), chat("same")])
    drawn = client.submit([chat("drawn", temperature=1.0)] * 3)
    assert texts(greedy.result(30)) == ["echo: same", "echo: other", "echo: same", "echo: same"]
    drawn.result(30)
    asked = [call.prompt for call in server.calls]
    assert sorted(asked) == ["drawn", "drawn", "drawn", "other", "same"]
    counters = client.counters()
    assert (counters.calls, counters.answers, counters.shared) == (5, 5, 2)


def test_cancelling_one_batch_leaves_the_others_whole(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.script = lambda call: Reply(delay=0.05 if call.prompt.startswith("later") else 0.3)
    client = make_client(concurrency=8)
    taken_back = client.submit([chat(f"shared {index}") for index in range(200)])
    assert eventually(lambda: len(server.calls) >= 8)
    # These join requests of the batch that is cancelled, and must then ask themselves.
    kept = client.submit([chat(f"shared {index}") for index in range(12)])
    later = client.submit([chat(f"later {index}") for index in range(50)])
    time.sleep(0.05)
    assert taken_back.cancel()
    with pytest.raises(CancelledError):
        taken_back.result(30)
    assert texts(kept.result(30)) == [f"echo: shared {index}" for index in range(12)]
    assert texts(later.result(30)) == [f"echo: later {index}" for index in range(50)]
    assert {call.prompt for call in server.calls} <= {
        *(f"shared {index}" for index in range(40)),
        *(f"later {index}" for index in range(50)),
    }


def test_a_request_names_its_model(
    server: ModelServer, make_client: MakeClient, tmp_path: Path
) -> None:
    client = make_client(model="tiny@3", version="3", cache=str(tmp_path / "answers.sqlite"))
    requests = [chat("a"), chat("a", model="tiny@2"), chat("a", model="tiny@3")]
    answers = client.ask_blocking(requests)
    assert sorted(call.body["model"] for call in server.calls) == ["tiny@2", "tiny@3"]
    assert [each.version for each in answers if isinstance(each, Answer)] == ["3", "", "3"]
    # Of the same question, the cache keeps the answers of two models apart.
    again = client.ask_blocking(requests)
    assert [each.cached for each in again if isinstance(each, Answer)] == [True] * 3
    assert len(server.calls) == 2

    # It is the request's own model that must answer; the client's may have several names.
    server.script = lambda call: Reply(model="tiny@3")
    assert texts(client.ask_blocking([chat("b", model="tiny@2"), chat("c")])) == [
        "malformed",
        "echo: c",
    ]


def test_close_takes_back_what_is_under_way(server: ModelServer, make_client: MakeClient) -> None:
    server.script = lambda call: Reply(delay=30)
    client = make_client()
    future = client.submit([chat("a")])
    assert eventually(lambda: len(server.calls) == 1)
    started = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - started < 5
    with pytest.raises(CancelledError):
        future.result(0)
    with pytest.raises(RuntimeError, match="was closed"):
        client.submit([chat("b")])
    assert not any(thread.name == "llm" for thread in threading.enumerate())


def test_the_thread_ends_with_the_process_and_jax_stays_out(server: ModelServer) -> None:
    server.script = lambda call: Reply(delay=0.0 if call.prompt == "hello" else 60.0)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, server.url], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.stderr, done.returncode) == ("echo: hello\n", "", 0)
    assert time.monotonic() - started < 45


def test_the_key_is_sent_and_nowhere_else(
    server: ModelServer,
    make_client: MakeClient,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    key, others = "sk-very-secret-123", "sk-of-someone-else"
    monkeypatch.setenv("MY_LLM_KEY", key)
    monkeypatch.setenv("OPENAI_API_KEY", others)
    monkeypatch.setenv("OPENAI_ORG_ID", "someone-elses")
    caplog.set_level(logging.DEBUG)

    def script(call: Call) -> Reply:
        said = f"you sent {call.headers['authorization']}"
        faults = {"refuse": Reply(said, status=401), "repeat": Reply(said)}
        return faults.get(call.prompt, Reply(drop=call.prompt == "drop"))

    server.script = script
    path = tmp_path / "answers.sqlite"
    client = make_client(api_key_env="MY_LLM_KEY", cache=str(path), attempts=2)
    answer, refused, dropped, repeated = client.ask_blocking(
        [chat("a"), chat("refuse"), chat("drop"), chat("repeat")]
    )
    assert server.calls[0].headers["authorization"] == f"Bearer {key}"
    assert isinstance(refused, Failure)
    assert "you sent Bearer [the API key]" in refused.message
    assert texts([repeated]) == ["you sent Bearer [the API key]"]
    told = (client, client.config, client.counters(), answer, refused, dropped, repeated)
    shown = [repr(x) for x in told]
    client.close()
    captured = capfd.readouterr()
    shown += [*said, caplog.text, captured.out, captured.err]
    shown += [p.read_bytes().decode("latin-1") for p in tmp_path.iterdir()]
    assert not any(key in text for text in shown)
    assert "POST" in caplog.text  # logging was on

    make_client().ask_blocking([chat("b")])
    last = server.calls[-1].headers
    assert others not in last.get("authorization", "")
    assert "openai-organization" not in last


def test_a_proxy_does_not_come_between_this_machine_and_itself(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert texts(make_client(wait_limit=1.0).ask_blocking([chat("a")])) == ["echo: a"]


def test_a_redirect_is_not_followed(make_client: MakeClient, server: ModelServer) -> None:
    """Else a server could send prompts on to any other, such as one inside of a network."""
    with ModelServer() as other:
        target = f"{other.url}/chat/completions"
        server.script = lambda call: Reply(status=307, headers={"location": target})
        (outcome,) = make_client().ask_blocking([chat("a")])
        assert other.calls == []
    assert texts([outcome]) == ["request"]
