"""A small OpenAI-compatible server on loopback. It samples with the embedded engine and fails on request."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from agro.config import SamplerConfig
from agro.models.policy import Policy
from agro.rollout.engines import Request
from agro.rollout.engines.hf import HF


class StandIn:
    """Its state: the policy that it serves, what was asked of it, and how many requests are yet to fail."""

    def __init__(self, policy: Policy) -> None:
        self.engine = HF(policy)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fail = 0
        self.how = "status"  # or "hang up", "drip the head", "drip the body", "abort"
        self.spoil = -1  # number of the completion that `change` spoils
        self.change: Callable[[dict[str, Any]], None] = lambda choice: None
        self.completions = 0
        self.raw = False  # log-probs of the policy, whatever the temperature of the request
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/collective_rpc":
            self.engine.load(Path(body["kwargs"]["weights_path"]), self.engine.version + 1)
            return {}
        if path != "/v1/completions":
            return {}
        sampler = SamplerConfig(
            temperature=body["temperature"], max_new=body["max_tokens"], stop=tuple(body["stop"] or ())
        )
        request = Request(0, body["prompt"], body["max_tokens"])
        (done,) = self.engine.decode(deque([request]), sampler, body["seed"])
        ids = done.tokens.tolist()
        text = self.engine.policy.decode(ids, body["prompt"])
        ended = ids[-1] in body["stop_token_ids"] or any(stop in text for stop in body["stop"] or ())
        logp = self._raw(body["prompt"], ids) if self.raw else done.logp.tolist()
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": logp},
            "finish_reason": "stop" if ended else "length",
        }
        if self.completions == self.spoil:
            self.change(choice)
        self.completions += 1
        return {"choices": [choice]}

    def _raw(self, prompt: list[int], ids: list[int]) -> list[float]:
        tokens = torch.tensor([[*prompt, *ids]])
        mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
        with torch.no_grad():
            streams = self.engine.policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)
        return streams["logp"][mask].tolist()


@contextmanager
def serving(policy: Policy) -> Iterator[tuple[str, StandIn]]:
    """(URL, state) of a server while it runs."""
    state = StandIn(policy)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            with state.lock:
                state.asked.append((self.path, body))
                failing, state.fail = state.fail > 0, max(0, state.fail - 1)
                if failing and state.how == "hang up":
                    self.close_connection = True
                    self.connection.close()
                    return
                content = {"error": "overloaded"} if failing else state.answer(self.path, body)
            if failing and state.how == "abort":
                content = {"choices": [{"token_ids": [], "logprobs": None, "finish_reason": "abort"}]}
            payload = json.dumps(content).encode()
            self.send_response(503 if failing and state.how == "status" else 200)
            self.send_header("Content-Length", str(len(payload)))
            if failing and state.how == "drip the head":
                self.drip(b"X-Slow: " + b"a" * 1000)
            self.end_headers()
            if failing and state.how == "drip the body":
                self.drip(payload)
            self.wfile.write(payload)

        def drip(self, content: bytes) -> None:
            """A byte every tenth of a second, until the client hangs up."""
            self.flush_headers()
            for byte in content:
                time.sleep(0.1)
                self.wfile.write(bytes([byte]))

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

    class SilentActivity(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that hangs up isn't shown."""

    server = SilentActivity(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
