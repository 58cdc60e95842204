"""`agro serve` under load, and beside `transformers serve`: `python benchmarks/door/run.py load|speed MODEL`.

load: 64 clients for SECONDS (600), with SIGKILL in the middle and a new start on the same port. Every answer
that a client got must be in the store once. speed: tokens a second at one and at eight clients, the two
servers one after the other, five times; further arguments are options of `transformers serve`, which needs
fastapi.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
import recording

from agro.io.processes import free_port
from agro.store import Store

TOKEN, CLIENTS, TOKENS, REPEATS = "a-token-of-the-benchmark", 64, 64, 5
RESULTS = Path(__file__).parents[1] / "results/door.json"


@contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "AGRO_TOKEN": TOKEN}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except httpx.HTTPError:
            time.sleep(0.3)
    sys.exit(f"{' '.join(process.args)}: didn't start")


def ask(http: httpx.Client, port: int, model: str, text: str, tokens: int) -> dict:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    headers = {"authorization": f"Bearer {TOKEN}"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return http.post(url, json=body, headers=headers).raise_for_status().json()


def load(model: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, port = Path(folder) / "s.db", free_port("127.0.0.1")
        command = [sys.executable, "-m", "agro", "serve", model, "--store", str(store), "--port", str(port)]
        answered: list[str] = []
        errors: Counter[str] = Counter()
        ends = 0.0

        def client(number: int) -> None:
            with httpx.Client(timeout=120) as http:
                while time.monotonic() < ends:
                    try:
                        answered.append(ask(http, port, model, str(number), 16)["id"])
                    except httpx.HTTPError as error:
                        errors[type(error).__name__] += 1
                        time.sleep(0.5)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        with running(command, port) as process:
            ends = time.monotonic() + seconds
            for thread in threads:
                thread.start()
            time.sleep(seconds / 2)
            process.send_signal(signal.SIGKILL)
            process.wait()
        with running(command, port):
            for thread in threads:
                thread.join()
        with Store.open(store, read_only=True) as opened:
            stored = Counter(call for sample in opened.samples() for call in sample.meta["calls"])
        got = [name.removeprefix("chatcmpl-") for name in answered]
        missing, twice = set(got) - set(stored), [name for name, count in stored.items() if count > 1]
        print(
            f"{CLIENTS} clients, {seconds:g} s, SIGKILL in the middle: {len(got)} answered, "
            f"{len(stored)} stored, {len(missing)} missing, {len(twice)} twice; errors {dict(errors)}"
        )
        assert not missing
        assert not twice


def speed(model: str, options: list[str]) -> None:
    ports = {name: free_port("127.0.0.1") for name in ("agro", "transformers")}
    commands = {
        "agro": [sys.executable, "-m", "agro", "serve", model, "--port", str(ports["agro"])],
        "transformers": ["transformers", "serve", model, "--port", str(ports["transformers"]), *options],
    }
    rows = []
    with (
        running(commands["agro"], ports["agro"]),
        running(commands["transformers"], ports["transformers"]),
        httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None)) as http,
    ):
        for clients in (1, 8):
            rates: dict[str, list[float]] = {name: [] for name in ports}
            for _ in range(REPEATS + 1):
                for name, port in ports.items():
                    rates[name].append(rate(http, port, model, clients))
            ours, peer = (rates[name][1:] for name in ("agro", "transformers"))  # the first one warms up
            ratios = [a / b for a, b in zip(ours, peer)]
            figures = {"goal": 2.0 if clients == 8 else None, "ratio": median(ratios), "peer": peer}
            rows.append(
                recording.row(f"tokens a second, {clients} clients", ours, **figures, options=options)
            )
            print(
                f"{clients} clients: agro {median(ours):.0f}, transformers serve {median(peer):.0f} tokens/s"
            )
            print(f"ratio {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f} of {REPEATS}")
    recording.write(RESULTS, rows)


def rate(http: httpx.Client, port: int, model: str, clients: int) -> float:
    """Tokens a second of two requests of each client."""
    began = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(lambda i: ask(http, port, model, f"{i}", TOKENS), range(2 * clients)))
    return sum(reply["usage"]["completion_tokens"] for reply in replies) / (time.monotonic() - began)


if __name__ == "__main__":
    what, model, *more = sys.argv[1:]
    if what == "load":
        load(model, float(more[0]) if more else 600)
    else:
        speed(model, more)
