"""A small model as a judge: the part of OpenAI's `/v1/chat/completions` that the reward `judge` uses.

    python examples/judge/serve.py FOLDER [PORT]

FOLDER has a chat model, such as SmolLM2-135M-Instruct. Small models seldom keep to a form, so the server
begins the reply for them, and lets the model write the number alone. Anything else that it writes is passed
on, and refused by the reward.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BEGIN = {"score": '{"reason": "", "score": ', "better": '{"reason": "", "better": '}


class Judge:
    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.lock = Lock()  # one reply at a time

    @torch.no_grad()
    def reply(self, messages: list[dict[str, str]]) -> str:
        begin = BEGIN["better" if '"better": N' in messages[0]["content"] else "score"]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self.tokenizer(text + begin, return_tensors="pt", add_special_tokens=False)
        with self.lock:
            tokens = self.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        written = self.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        number = re.match(r"\d+(\.\d+)?", written)
        return begin + (f"{number[0]}}}" if number else written)


class Handler(BaseHTTPRequestHandler):
    judge: Judge

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = self.judge.reply(request["messages"])
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        body = json.dumps({"model": request["model"], "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed of each request."""


def main(folder: str, port: int) -> None:
    Handler.judge = Judge(folder)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
