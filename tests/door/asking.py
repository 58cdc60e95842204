"""Requests to a door, and what its store has of them: the file s.db of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from agro.store import Store
from agro.types import Sample

TOKEN, PATH = "the-token-of-tests", "/v1/chat/completions"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
HI = [{"role": "user", "content": "hi"}]


def post(url: str, path: str = PATH, **fields: Any) -> httpx.Response:
    """The reply to a request, of chat completions where no other path is given, whatever its status."""
    body = {"model": "tiny", **({"messages": HI} if path.endswith(PATH) else {}), **fields}
    return httpx.post(url + path, json=body, headers=HEADERS, timeout=60)


def ask(url: str, messages: list[Any] = HI, path: str = PATH, **fields: Any) -> Any:
    reply = post(url, path, **{"messages": messages, "max_tokens": 12, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def feedback(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/feedback", json=fields, headers=HEADERS)


def stored(folder: Path) -> list[Sample]:
    with Store.open(folder / "s.db", read_only=True) as store:
        return list(store.samples())


def turn(reply: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", headers=HEADERS).text
    return float(text.split(f"\nagro_door_{name} ")[1].split()[0])
