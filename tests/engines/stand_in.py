"""A small server on loopback with vLLM's routes, and SGLang's as they are documented. It samples with the
embedded engine and fails on request.

`push` says what comes of new weights; "right" unless a test asks for one of vLLM's silent failures.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agro.config import NewModel, SamplerConfig
from agro.models.adapters import merged_with
from agro.models.policy import Policy
from agro.models.pretrained import own_logp
from agro.models.published import Form
from agro.rollout.engines import Continuation, Engine, Request
from agro.rollout.engines.hf import HF

NEW = NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=16)
FORM: dict[str, Form] = {"reload": "explicit_head", "transfer": "model", "adapter": "adapter"}


def decoded(
    engine: Engine, count: int = 1, ids: Sequence[int] = (1, 2), room: int = 3, **sampler: Any
) -> list[Continuation]:
    """What an engine makes of so many equal requests."""
    waiting = deque(Request(i, list(ids), room) for i in range(count))
    return list(engine.decode(waiting, SamplerConfig(**sampler), seed=0))


class StandIn:
    """Its state: the policy that it serves, what was asked of it, and how many requests are yet to fail."""

    def __init__(self, policy: Policy) -> None:
        self.engine, self.url = HF(policy), ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fail = 0
        self.how = "status"  # or "hang up", "drip the head", "drip the body", "abort"
        self.spoil = -1  # number of the completion that `change` spoils
        self.change: Callable[[dict[str, Any]], None] = lambda choice: None
        self.completions = 0
        self.raw = False  # log-probs of the policy, whatever the temperature of the request
        self.push = "right"  # or "nothing", "half", "stale head", "first adapter"
        self.failing_updates = 0  # of /finish_weight_update that are yet to fail
        self.without: tuple[str, ...] = ()  # routes that it doesn't have
        self.keys: list[str | None] = []  # that came with requests for responses
        self.dead = False  # whether it hangs up on every request
        self.adapters: dict[str, str] = {}  # folder by name
        self.labels = ["default"]  # versions of the model itself, the newest last
        self.asleep = 0  # the level of its sleep
        self.loses = False  # whether it serves the model alone after a wake, under the name of any adapter
        self.lost = False
        self.base = {k: v.clone() for k, v in policy.model.state_dict().items()}
        self.folder = policy.model.config._name_or_path
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path in ("/v1/completions", "/inference/v1/generate", "/generate"):
            return self._sglang(body) if path == "/generate" else self._complete(path, body)
        if path in ("/collective_rpc", "/update_weights_from_disk"):
            own = {"weights_path": self.folder}  # where the request names none
            folder = body.get("model_path") or body.get("kwargs", own)["weights_path"]
            self._take(sorted(Path(folder).glob("*.safetensors")))
        elif path == "/init_weight_transfer_engine":
            if not body["init_info"]["names"]:
                raise ValueError("expected the names of weights")
        elif path == "/update_weights":
            self._take([Path(file) for file in body["update_info"]["files"]])
        elif path in ("/finish_weight_update", "/update_weight_version"):
            if self.failing_updates:
                self.failing_updates -= 1
                raise BrokenPipeError
            self.labels.append(body.get("weight_version") or body["new_version"])
        elif path.endswith("/load_lora_adapter"):
            if body["lora_name"] in self.adapters:
                raise ValueError("The lora adapter has already been loaded")
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif path.endswith("/unload_lora_adapter"):
            del self.adapters[body["lora_name"]]
        return {}

    def sleeps(self, path: str, query: str) -> bool:
        """Whether the request is of its sleep, of which level 2 forgets all weights."""
        if path == "/sleep":
            self.asleep = int(query[-1])
            if self.asleep == 2:
                for weight in [*self.engine.policy.model.state_dict().values(), *self.base.values()]:
                    weight.zero_()
        elif path == "/wake_up":
            self.lost = self.loses
            self.asleep *= query.endswith("weights")
        elif self.asleep and path != "/collective_rpc":
            raise BrokenPipeError
        return path in ("/sleep", "/wake_up")

    def _take(self, files: list[Path]) -> None:
        """Load new weights, or what `push` makes of them."""
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        model = self.engine.policy.model
        if self.push == "nothing":
            return
        if self.push == "half":
            weights = dict(list(weights.items())[: len(weights) // 2])
        if self.push == "stale head":
            weights.pop("lm_head.weight", None)
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.load_state_dict(weights, strict=False)
        if self.asleep:
            self.base = {k: v.clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def _choose(self, name: str | None) -> None:
        """Serve the adapter of this name, or else the model itself."""
        if name in self.adapters and self.lost:
            self.engine.policy.model.load_state_dict(self.base)
        elif name in self.adapters:
            if self.push == "first adapter":
                name = next(iter(self.adapters))
            model = self.engine.policy.model
            model.load_state_dict(self.base)
            tuned = merged_with(copy.deepcopy(model), self.adapters[name])
            model.load_state_dict(tuned.state_dict())

    def _logp(self, ids: list[int]) -> list[float]:
        """Of each token after the first, at temperature 1."""
        with torch.no_grad():
            return own_logp(self.engine.policy.model, torch.tensor(ids), 1.0)[0].tolist()

    def _score(self, ids: list[int]) -> dict[str, Any]:
        scores = [{str(token): {"logprob": x}} for token, x in zip(ids[1:], self._logp(ids), strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *scores]}]}

    def _complete(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._choose(body.get("model"))
        if "prompt_logprobs" in body:
            return self._score(body["prompt"])
        if path == "/v1/completions":
            return {"choices": [self._sample(body)]}
        choice = self._sample(body["sampling_params"] | {"prompt": body["token_ids"]})
        logp = choice["logprobs"]["token_logprobs"]
        choice["logprobs"] = {"content": [{"logprob": x} for x in logp]}
        ends = [0, len(logp) // 2, len(logp)] if len(self.labels) > 2 else [0, len(logp)]
        spans = zip(self.labels[-len(ends) + 1 :], ends, ends[1:], strict=False)
        choice["weight_versions"] = [
            {"version": v, "start": start, "end": end} for v, start, end in spans if start < end
        ]
        return {"choices": [choice]}

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        def entries(logp: list[float | None], ids: list[int]) -> list[list[Any]]:
            return [[x, token, None] for token, x in zip(ids, logp, strict=True)]

        self._choose(body.get("lora_path"))
        ids, settings = body["input_ids"], body["sampling_params"]
        if body["logprob_start_len"] == 0:
            scores = entries([None, *self._logp(ids)], ids)
            meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": scores}
            return {"output_ids": [0], "meta_info": meta}
        names = {"max_tokens": settings["max_new_tokens"], "seed": settings["sampling_seed"]}
        choice = self._sample({**settings, **names, "prompt": ids})
        scores = entries(choice["logprobs"]["token_logprobs"], choice["token_ids"])
        meta = {"finish_reason": {"type": choice["finish_reason"]}, "output_token_logprobs": scores}
        return {"output_ids": choice["token_ids"], "meta_info": meta}

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        same = {name: body[name] for name in ("temperature", "top_p", "min_p")}
        top_k, stop = max(0, body["top_k"]), tuple(body["stop"] or ())
        sampler = SamplerConfig(**same, top_k=top_k, max_new=body["max_tokens"], stop=stop)
        request = Request(0, body["prompt"], body["max_tokens"])
        (done,) = self.engine.decode(deque([request]), sampler, body["seed"])
        ids = done.tokens.tolist()
        text = self.engine.policy.encoder.decode(ids, body["prompt"])
        ended = ids[-1] in body["stop_token_ids"] or any(each in text for each in stop)
        logp = self._logp([*body["prompt"], *ids])[-len(ids) :] if self.raw else done.logp.tolist()
        finish = "stop" if ended else "length"
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": logp}, "finish_reason": finish}
        if self.completions == self.spoil:
            self.change(choice)
        self.completions += 1
        return choice


class Handler(BaseHTTPRequestHandler):
    """Hands requests to the stand-in, and fails as it says."""

    state: StandIn

    def do_GET(self) -> None:
        if self.state.dead:
            self.hang_up()
            return
        models = [{"id": name} for name in ("model", *self.state.adapters)]
        self.reply(200, {"data": models})

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        with state.lock:
            state.asked.append((self.path, body))
            key = os.environ.get("VLLM_API_KEY")  # of vLLM's own routes alone, as there
            if key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {key}":
                self.reply(401, {"error": "Unauthorized"})
                return
            if self.path == "/v1/completions":
                state.keys.append(self.headers["Authorization"])
            failing, state.fail = state.fail > 0, max(0, state.fail - 1)
            if state.dead or (failing and state.how == "hang up"):
                self.hang_up()
                return
            status, content = self.fail() if failing else self.answer(body)
        self.reply(status, content, state.how if failing else "")

    def fail(self) -> tuple[int, dict[str, Any]]:
        if self.state.how == "abort":
            return 200, {"choices": [{"token_ids": [], "logprobs": None, "finish_reason": "abort"}]}
        return 503 if self.state.how == "status" else 200, {"error": "overloaded"}

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.path in self.state.without:
            return 404, {"detail": "Not Found"}
        if self.path == "/tokenize":
            tokenizer = self.state.engine.policy.tokenizer
            return 200, {"tokens": tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        try:
            path = self.path.partition("?")[0]
            return 200, {} if self.state.sleeps(path, self.path) else self.state.answer(path, body)
        except BrokenPipeError:
            return 500, {"error": "weights are missing"}
        except ValueError as error:
            return 400, {"error": str(error)}

    def reply(self, status: int, content: dict[str, Any], how: str = "") -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        if how == "drip the head":
            self.drip(b"X-Slow: " + b"a" * 1000)
        self.end_headers()
        if how == "drip the body":
            self.drip(payload)
        self.wfile.write(payload)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def drip(self, content: bytes) -> None:
        """A byte every tenth of a second, until the client hangs up."""
        self.flush_headers()
        for byte in content:
            time.sleep(0.1)
            self.wfile.write(bytes([byte]))

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


class Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up isn't shown."""


@contextmanager
def serving(policy: Policy, port: int = 0) -> Iterator[tuple[str, StandIn]]:
    """(URL, state) of a server while it runs."""
    state = StandIn(policy)
    server = Listener(("127.0.0.1", port), type("Of", (Handler,), {"state": state}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state.url, state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
