"""`agro proxy` before another door, as a server with OpenAI's interface, and before one that fails."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest
from asking import HEADERS, HI, PATH, TOKEN, metric, post, stored
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agro.door.proxy import Proxy
from agro.door.sessions import Keeping
from agro.errors import Refused
from agro.pages.local_server import behind_a_port

KEY = "sk-the-key-of-the-server-behind"


@pytest.fixture
def proxy(behind):
    """A function: URL and file of a store -> a context with the URL of a proxy."""

    @contextlib.contextmanager
    def make(url: str, store=None, key: str | None = KEY, *, tokens: bool = False):
        made = Proxy(url, key, Keeping(store and str(store)), 20, tokens=tokens)
        with contextlib.closing(made), behind(made) as address:
            yield address

    return make


@pytest.fixture
def vllm():
    """A server that answers as vLLM does, and the headers and bodies that it got."""
    got: list[tuple[dict, dict]] = []
    turns = {1: ([5, 6], "ab"), 3: ([7, 2], "c")}

    async def complete(request: Request) -> Response:
        body = await request.json()
        got.append((dict(request.headers), body))
        if body["model"] == "broken":
            return JSONResponse({"error": {"message": "overloaded"}}, 429)
        ids, text = turns[len(body["messages"])]
        context = [1, 2, 3] if len(body["messages"]) == 1 else [1, 2, 3, 5, 6, 9]
        content = [{"token": "t", "logprob": -0.5 * i} for i in ids]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        if not body.get("stream"):
            choice["message"] = {"role": "assistant", "content": text}
            reply = {"id": f"chatcmpl-{len(got)}", "model": "big", "prompt_token_ids": context}
            return JSONResponse({**reply, "choices": [choice]})
        parts = [{"index": 0, "delta": {"content": c}, "token_ids": [i]} for c, i in zip(text, ids)]
        parts += [{**choice, "delta": {}, "token_ids": ids[len(text) :]}]
        events = [{"model": "big", "choices": [part]} for part in parts]
        events[0]["prompt_token_ids"] = context
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")

    class Server:
        app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])

    return Server, got


def test_what_passes_is_what_the_server_says_and_is_stored(serving, proxy, tmp_path) -> None:
    with serving() as behind_it, proxy(behind_it, tmp_path / "s.db", key=TOKEN) as url:
        asked = {"model": "tiny", "messages": HI, "max_tokens": 9, "seed": 4}
        first, direct = post(url, **asked).json(), post(behind_it, **asked).json()
        assert first["choices"][0]["message"] == direct["choices"][0]["message"]
        turn = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        more = {**asked, "messages": [*HI, turn, {"role": "user", "content": "and?"}], "stream": True}
        lines = [line for line in post(url, **more).text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        post(url, "/v1/messages", model="tiny", messages=HI, max_tokens=5, stream=True)
        post(url, "/v1/responses", model="tiny", input="hello", max_output_tokens=5, stream=True)
        assert httpx.get(f"{url}/v1/models", headers=HEADERS).json()["data"][0]["id"] == "tiny"
    chat, anthropic, responses = stored(tmp_path)
    parts = [json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert (chat.meta["turns"], chat.response, chat.source) == (2, "".join(parts), "proxy:tiny")
    assert chat.meta["continuation"][0]["content"] == turn["content"]
    assert chat.tokens is None
    assert (anthropic.prompt, responses.prompt) == (HI, [{"role": "user", "content": "hello"}])
    assert anthropic.sampling is None
    assert chat.sampling == {"seed": 4}


@pytest.mark.parametrize("stream", [False, True])
def test_ids_and_log_probs_of_the_server_are_stored(vllm, proxy, tmp_path, stream) -> None:
    server, got = vllm
    with behind_a_port(server.app) as at, proxy(at, tmp_path / "s.db", tokens=True) as url:
        assert post(url, model="m", messages=HI, stream=stream).status_code == 200
        more = [*HI, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "?"}]
        assert post(url, model="m", messages=more, stream=stream).status_code == 200
    [row] = stored(tmp_path)
    assert row.tokens.tolist() == [1, 2, 3, 5, 6, 9, 7, 2]
    assert row.action.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2
    assert row.response == "c"
    if not stream:
        assert row.behavior_logp[row.action].tolist() == [-2.5, -3, -3.5, -1]
    headers, body = got[0]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body["return_token_ids"] is True


def test_feedback_names_an_answer_by_the_server_s_id(vllm, proxy, tmp_path) -> None:
    def send(url: str, **fields) -> int:
        return httpx.post(f"{url}/v1/feedback", json=fields, headers=HEADERS).status_code

    server, _ = vllm
    more = [*HI, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "?"}]
    with behind_a_port(server.app) as at, proxy(at, tmp_path / "s.db") as url:
        _, second = (post(url, model="m", messages=messages).json()["id"] for messages in (HI, more))
        assert send(url, id=second, reward=0.5) == 200
        assert send(url, id="chatcmpl-9", reward=1) == 404
        headers = {**HEADERS, "x-agro-session": "1"}  # a session that is named as the first answer
        httpx.post(url + PATH, json={"model": "m", "messages": HI}, headers=headers)
        assert send(url, session="1", reward=1) == 200
        assert [row.reward for row in stored(tmp_path)] == [0.5, 1]
    with proxy("http://127.0.0.1:1", tmp_path / "s.db") as url:  # another process, days later
        assert send(url, id=second, reward=0, correction="ok") == 200
    row, _, winner, loser = stored(tmp_path)
    assert (row.reward, row.meta["calls"]) == (0, ["1", "2"])
    assert [(each.prompt, each.response) for each in (winner, loser)] == [(more, "ok"), (more, "c")]


def test_corrections_of_answers_with_the_same_id_are_all_kept(replies, proxy, tmp_path) -> None:
    """Ollama's ids are random numbers below 999."""
    choices = [{"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}]
    reply = json.dumps({"id": "chatcmpl-7", "model": "m", "choices": choices}).encode()
    more = [*HI, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "?"}]
    other = [{"role": "user", "content": "other"}]
    with replies(reply, "application/json") as at, proxy(at, tmp_path / "s.db") as url:
        for messages, correction in ((HI, "1"), (more, "2"), (other, "3"), (other, "4")):
            assert post(url, model="m", messages=messages).status_code == 200
            fields = {"id": "chatcmpl-7", "correction": correction}
            assert httpx.post(f"{url}/v1/feedback", json=fields, headers=HEADERS).status_code == 200
    found = [(row.prompt, row.response) for row in stored(tmp_path) if row.role == "expert"]
    assert found == [(HI, "1"), (more, "2"), (other, "3"), (other, "4")]


def test_errors_pass_and_keys_are_nowhere(vllm, proxy, tmp_path, capfd) -> None:
    server, _ = vllm
    with behind_a_port(server.app) as at, proxy(at, tmp_path / "s.db") as url:
        reply = post(url, model="broken", messages=HI)
        assert (reply.status_code, reply.json()["error"]["message"]) == (429, "overloaded")
        assert httpx.post(f"{url}/v1/chat/completions", json={}, headers={}).status_code == 401
        assert post(url, model="m").status_code == 200
        headers = {**HEADERS, "x-agro-session": "one"}  # the session's name
        httpx.post(url + PATH, json={"model": "m", "messages": HI}, headers=headers)
        assert httpx.post(f"{url}/v1/feedback", json={"reward": 1}, headers=headers).status_code == 200
    with proxy("http://127.0.0.1:1") as url:
        assert post(url, model="m").status_code == 502
    assert [row.reward for row in stored(tmp_path)] == [None, 1]
    assert KEY not in (tmp_path / "s.db").read_bytes().decode("latin-1")
    assert KEY not in "".join(capfd.readouterr())
    with pytest.raises(Refused, match="expected the URL"):
        Proxy("ftp://x", None, Keeping(), 1, tokens=False)


@pytest.fixture
def replies():
    """A function: bytes and their content type -> a server that answers with them, whatever it is asked."""

    def make(content, kind: str = "text/event-stream"):
        async def complete(request: Request) -> Response:
            parts = content() if callable(content) else iter([content])
            return StreamingResponse(parts, media_type=kind)

        paths = [Route(path, complete, methods=["POST"]) for path in (PATH, "/v1/messages")]
        return behind_a_port(Starlette(routes=paths))

    return make


def chunk(text: str, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'model': 'm', 'choices': [choice]}, ensure_ascii=False)}\n\n"


def test_a_text_may_have_marks_and_ends_of_lines_of_its_own(replies, proxy, tmp_path) -> None:
    sent = chunk("[DONE]\u2028") + chunk('"type":"message_stop"\x85', "stop") + "data: [DONE]"
    with replies(sent.replace("\n", "\r\n").encode()) as at, proxy(at, tmp_path / "s.db") as url:
        assert post(url, model="m").text == sent + "\n\n"
    assert [row.response for row in stored(tmp_path)] == ['[DONE]\u2028"type":"message_stop"\x85']


def breaks_off():
    yield chunk("ab").encode()
    raise OSError("the server dies")


@pytest.mark.parametrize(
    ("content", "kind", "expected"),
    [
        (b"data: 5\n\ndata: [DONE]\n\n", "text/event-stream", "data: [DONE]"),
        (b'data: {"type": "content_block_delta", "index": 4}\n\n', "text/event-stream", "content_block"),
        (chunk("ab").encode(), "text/event-stream", "ab"),  # it has no end
        (b"<html>", "application/json", "<html>"),
        (b'{"choices": 5}', "application/json", '{"choices": 5}'),
    ],
)
def test_what_cannot_be_read_passes_and_is_counted(replies, proxy, tmp_path, content, kind, expected) -> None:
    with replies(content, kind) as at, proxy(at, tmp_path / "s.db") as url:
        reply = post(url, model="m")
        assert (reply.status_code, expected in reply.text, "error" in reply.text) == (200, True, False)
        assert metric(url, "unstored_total") == 1
    assert stored(tmp_path) == []


@pytest.mark.parametrize(
    ("ids", "logprob"),
    [([5], "NaN"), ([5], "0.5"), ([5], '"-1"'), (["5"], "-1"), ([2**40], "-1"), ([-1], "-1")],
)
def test_numbers_that_cannot_be_are_not_stored(replies, proxy, tmp_path, ids, logprob) -> None:
    choice = f'"token_ids": {json.dumps(ids)}, "logprobs": {{"content": [{{"logprob": {logprob}}}]}}'
    message = '"message": {"role": "assistant", "content": "a"}'
    content = f'{{"prompt_token_ids": [1], "choices": [{{"index": 0, {message}, {choice}}}]}}'
    with replies(content.encode(), "application/json") as at, proxy(at, tmp_path / "s.db") as url:
        assert post(url, model="m").text == content
        assert metric(url, "unstored_total") == 1
    assert stored(tmp_path) == []


def test_a_server_that_dies_or_says_too_much_ends_in_an_error(replies, proxy, monkeypatch, tmp_path) -> None:
    with replies(breaks_off) as at, proxy(at, tmp_path / "s.db") as url:
        text = post(url, "/v1/messages", model="m", messages=HI, max_tokens=5, stream=True).text
        assert json.loads(text.split("data: ")[-1])["type"] == "error"  # as Anthropic's service says it
    monkeypatch.setattr("agro.door.proxy.REPLY_BYTES", 100)
    with replies(chunk("x" * 200).encode()) as at, proxy(at, tmp_path / "s.db") as url:
        assert "at most 100 bytes" in post(url, model="m").text
    with replies(b" " * 200, "application/json") as at, proxy(at, tmp_path / "s.db") as url:
        assert post(url, model="m").status_code == 502
    assert stored(tmp_path) == []
