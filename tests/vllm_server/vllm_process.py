"""A vLLM server in a process, on a tiny model, from the environment that `make test-vllm` makes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from agro.io.processes import free_port

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("AGRO_VLLM", ROOT / ".venv-vllm")) / "bin/python"
START_SECONDS = 600
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
ALWAYS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--host", "127.0.0.1")
PROCESSED = ("--logprobs-mode", "processed_logprobs")
TRANSFER = ("--enable-scale-out", "--weight-transfer-config", '{"backend": "agro_files"}')
ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")


@contextmanager
def running(model: Path, log: Path, *options: str) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a server of `model`, which is ended with all of its processes."""
    port = free_port("127.0.0.1")
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *ALWAYS]
    command += ["--served-model-name", "m", "--port", str(port), *options]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | SETTINGS
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=log.parent, start_new_session=True
        )
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            end(process)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1)
    raise AssertionError(f"vLLM didn't start in {START_SECONDS} s: {log.read_text(errors='replace')[-3000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """The server, and the workers in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
