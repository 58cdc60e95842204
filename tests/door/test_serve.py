"""`agro serve`: what clients get, what the store has of it, and who is refused."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import httpx
import numpy as np
import pytest
import torch
from asking import HEADERS, HI, PATH, TOKEN, ask, feedback, metric, post, stored, turn
from transformers import DynamicCache

from agro.door import app
from agro.door.batch import Token
from agro.door.door import CallSyntax
from agro.door.sessions import Keeping, Memory, Recorder, Sessions
from agro.errors import Unwritable
from agro.store import Store
from agro.types.conversation import declarations

WORK = f"/s/work{PATH}"  # of a session
TOOL = {
    "name": "add",
    "description": "the sum",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = {"name": "add", "arguments": "{}"}


def asking(reply, text: str = "and?") -> list:
    """What the user asks after a reply to HI."""
    return [*HI, turn(reply), {"role": "user", "content": text}]


def text_of_stream(url: str, **fields) -> tuple[str, list]:
    reply = post(url, max_tokens=40, stream=True, **fields)
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices


def test_an_answer_is_stored_with_its_tokens_and_their_log_probs(url, engine, tmp_path) -> None:
    """The origin of the expected log-probs: a forward pass over the complete sequence."""
    reply = ask(url, seed=3, temperature=0.7, top_p=1)
    [sample] = stored(tmp_path)
    choice = reply["choices"][0]
    assert sample.response == choice["message"]["content"]
    assert sample.action.sum() == reply["usage"]["completion_tokens"]
    assert len(sample.tokens) == reply["usage"]["total_tokens"]
    assert (sample.reward, sample.role, sample.source) == (None, "policy", "tiny")
    assert (sample.episode, sample.sampling["temperature"]) == (choice["id"][:24], 0.7)
    with torch.no_grad():
        logits = engine.policy.model(torch.tensor(sample.tokens[None])).logits[0, :-1] / 0.7
    assert_log_probs(sample, logits, atol=1e-5)


def assert_log_probs(sample, logits, atol: float) -> None:
    """Of the actions they are those of the logits, of the other tokens unknown."""
    ids = torch.tensor(sample.tokens[1:, None]).long()
    expected = logits.log_softmax(1).gather(1, ids)[:, 0].numpy()
    mask = sample.action[1:]
    assert np.allclose(sample.behavior_logp[1:][mask], expected[mask], atol=atol)
    assert np.isnan(sample.behavior_logp[1:][~mask]).all()


def test_clients_share_a_batch_and_none_sees_the_others(serving) -> None:
    """With a seed an answer is the same beside seven others, which have other samplers, as alone."""
    requests = [
        {"seed": i, "temperature": [0, 0.5, 1, 2][i % 4], "max_tokens": 10 + 90 * i, "top_k": i}
        for i in range(8)
    ]
    with serving() as url:
        alone = [turn(ask(url, **fields)) for fields in requests]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda fields: turn(ask(url, **fields)), requests))
    assert together == alone
    assert len({answer["content"] for answer in alone}) == 8


def test_more_clients_than_rows_wait_for_each_other(serving) -> None:
    with serving(size=2) as url, ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda i: ask(url, seed=i), range(12)))
    assert len(replies) == 12


def test_a_stream_says_what_a_whole_answer_says(url) -> None:
    for seed in range(6):
        whole = ask(url, seed=seed, max_tokens=40, logprobs=True, top_logprobs=2)["choices"][0]
        text, choices = text_of_stream(url, seed=seed, logprobs=True, top_logprobs=2)
        assert text == whole["message"]["content"]
        assert choices[-1]["finish_reason"] == whole["finish_reason"]
        parts = [token for choice in choices for token in (choice["logprobs"] or {}).get("content", [])]
        assert parts == whole["logprobs"]["content"][: len(parts)]


def test_a_stop_text_ends_an_answer_and_is_not_shown(url, engine, tmp_path) -> None:
    whole = turn(ask(url, seed=1, max_tokens=30))["content"]
    stop = whole[5:8]
    reply = ask(url, seed=1, max_tokens=30, stop=stop)["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == (whole[:5], "stop")
    assert text_of_stream(url, seed=1, stop=[stop])[0] == whole[:5]
    for sample in stored(tmp_path)[1:]:
        assert sample.response == sample.meta["last_turn"] == whole[:5]
        sampled = engine.policy.encoder.decode(sample.tokens[sample.action].tolist())
        assert sampled == whole[:8]  # the stop text's tokens were sampled


def test_choices_are_answers_of_their_own(url, tmp_path) -> None:
    choices = ask(url, n=3, seed=5)["choices"]
    assert feedback(url, id=choices[1]["id"], reward=2).status_code == 200
    samples = stored(tmp_path)
    assert len({sample.episode for sample in samples}) == 3
    assert len({sample.prompt_id for sample in samples}) == 1
    rewards = {sample.response: sample.reward for sample in samples}
    assert [rewards[choice["message"]["content"]] for choice in choices] == [None, 2, None]


def test_a_call_that_extends_another_extends_its_row(url, engine, tmp_path) -> None:
    first = ask(url)
    second = ask(url, asking(first))
    third = ask(url, [*asking(first), turn(second), {"role": "user", "content": "then?"}])
    [sample] = stored(tmp_path)
    written = [turn(reply)["content"] for reply in (first, second, third)]
    chosen = engine.policy.encoder.decode(sample.tokens[sample.action].tolist())
    assert chosen == "".join(written)
    assert sample.meta["turns"] == 3
    assert [m["content"] for m in sample.meta["continuation"]][::2] == written
    assert np.isfinite(sample.behavior_logp[sample.action]).all()


def test_a_rewrite_and_a_branch_begin_rows_of_one_episode(url, tmp_path) -> None:
    first = ask(url, path=WORK)
    for messages in (
        asking(first),
        asking(first),  # a retry: a branch
        [{"role": "user", "content": "hi, in short"}],  # the history is written anew
    ):
        ask(url, messages, path=WORK)
    other = {"authorization": f"Bearer {TOKEN}:other"}
    body = {"model": "tiny", "messages": HI, "max_tokens": 12}
    assert httpx.post(url + PATH, json=body, headers=other, timeout=60).status_code == 200
    ask(url)
    assert feedback(url, session="work", reward=0.5).json()["rows"] == 3
    for unknown in ({"session": "nobody"}, {"id": "work.0.9"}, {"id": "work.other"}):
        assert feedback(url, **unknown, reward=0.7).status_code == 404
    samples = stored(tmp_path)
    work = [sample for sample in samples if sample.episode == "work"]
    assert [(s.meta["row"], s.reward) for s in work] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert {s.prompt_id for s in work} == {work[0].prompt_id}
    assert [s.context_tokens is None for s in work] == [True, False, False]
    branch, rewrite = work[1:]
    assert not branch.action[: len(branch.context_tokens)].any()
    assert len(branch.context_tokens) > len(rewrite.context_tokens)
    assert sorted(s.episode for s in samples if s.reward is None)[-1] == "other"


def test_a_session_goes_on_after_a_restart(serving, monkeypatch, tmp_path) -> None:
    """Its rows are found again, also where they are more than a page."""
    monkeypatch.setattr("agro.door.sessions.PAGE", 2)
    with serving(tmp_path / "s.db") as url:
        first = ask(url, path=WORK)
        for _ in range(4):
            ask(url, path=WORK)
        assert feedback(url, session="work", thumb="up").json()["rows"] == 5
    with serving(tmp_path / "s.db") as url:
        ask(url, asking(first), path=WORK)
        assert feedback(url, id=first["id"], comment="still good").json()["reward"] == 1
    found = [(s.meta["row"], s.reward, len(s.meta["feedback"])) for s in stored(tmp_path)]
    assert found == [(row, 1, 2) for row in range(6)]


def test_the_last_feedback_counts_and_all_is_kept(url, tmp_path) -> None:
    reply = ask(url)
    for fields in ({"reward": 1}, {"reward": 1}, {"thumb": "down"}, {"comment": "hm"}):
        assert feedback(url, id=reply["id"], **fields).status_code == 200
    ask(url, asking(reply))  # the row is replaced by a longer one
    for text in ("hello", "hello there"):
        assert feedback(url, id=reply["id"], correction=text).status_code == 200
    both, same = {"reward": 1, "thumb": "up"}, {"correction": turn(reply)["content"]}
    for wrong in ({}, {"reward": "1"}, {"reward": True}, {"thumb": "left"}, both, same):
        assert feedback(url, id=reply["id"], **wrong).status_code == 400
    with Store.open(tmp_path / "s.db") as store:
        row, winner, loser = store.samples()
        [pair] = store.pairs([winner.id, loser.id])
    assert (row.reward, len(row.meta["feedback"])) == (0, 6)
    assert [entry.get("reward", entry.get("thumb")) for entry in row.meta["feedback"]][:3] == [1, 1, "down"]
    assert (winner.response, winner.role, loser.response) == ("hello there", "expert", turn(reply)["content"])
    assert (pair.winner, pair.loser) == (winner.id, loser.id)
    assert winner.prompt == loser.prompt == HI


@pytest.mark.parametrize("redact", [True, False])
def test_what_is_private_is_not_stored(serving, tmp_path, redact) -> None:
    asked = [{"role": "user", "content": "i am ann@example.org, sk-abcdefghijklmnopqrstuvwxyz"}]
    with serving(tmp_path / "s.db", redact=redact) as url:
        reply = ask(url, asked)
        ask(url, [*asked, turn(reply), {"role": "user", "content": "and bob@example.org"}])
        feedback(url, id=reply["id"], comment="ask eve@example.org", reward=1)
    [sample] = stored(tmp_path)
    assert sample.reward == 1
    if redact:
        assert sample.prompt[0]["content"] == "i am [e-mail address], [key]"
        assert sample.tokens is None  # they say it too
        assert "example.org" not in json.dumps([sample.prompt, sample.response, sample.meta])
    else:
        assert sample.prompt == asked


def test_a_demanded_call_of_a_tool_begins_with_its_name(url, tmp_path) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    ask(url, tools=[{"type": "function", "function": TOOL}], tool_choice=choice)
    assert post(url, tool_choice=choice).status_code == 400
    [sample] = stored(tmp_path)
    assert sample.prompt[0]["role"] == "tools"
    assert sample.meta["last_turn"].startswith('<tool_call>\n{"name": "add')
    assert sample.action.sum() <= 12  # what was demanded isn't the policy's choice


def test_who_leaves_ends_the_request(url, tmp_path) -> None:
    body = {"model": "x", "messages": HI, "max_tokens": 1900, "temperature": 0, "logit_bias": {}}
    for stream in (False, True):
        asked = {"json": {**body, "stream": stream}, "headers": HEADERS, "timeout": 0.2}
        with suppress(httpx.ReadTimeout), httpx.stream("POST", f"{url}{PATH}", **asked) as reply:
            next(reply.iter_bytes())  # the first part of a stream; nothing of a whole answer
        deadline = time.monotonic() + 20
        while metric(url, "running") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metric(url, "running") == 0
    ask(url)  # it goes on
    assert len(stored(tmp_path)) == 1


def test_an_answer_has_a_time_limit(serving) -> None:
    with serving(seconds=1e-6) as url:
        assert post(url).status_code == 504


WRONG_FIELDS = [
    ({"temperature": 3}, "temperature"),
    ({"n": 0}, "n"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"surprise": 1}, "surprise"),
    ({"stop": [""]}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOL, {"type": "web_search"}]}, "tools"),
    ({"tools": [{**TOOL, "parameters": "x"}]}, "tools"),
    ({"tools": [{**TOOL, "parameters": {"properties": None}}]}, "tools"),
    ({"stream_options": 5}, "stream_options"),
    ({"tools": [{"type": "function", "function": TOOL}], "tool_choice": {"function": 5}}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "messages"),
    ({"messages": [{**HI[0], "tool_calls": [{"id": [], "function": {**CALL}}]}]}, "messages"),
    ({"messages": [*HI, {"role": "tool", "tool_call_id": {}, "content": "x"}]}, "messages"),
]


def test_a_field_that_is_wrong_is_refused_by_its_name(serving) -> None:
    with serving() as url:
        for fields, param in WRONG_FIELDS:
            reply = post(url, **fields)
            error = reply.json()["error"]
            found = (reply.status_code, error["param"], error["type"])
            assert found == (400, param, "invalid_request_error"), fields


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [({"type": "string"}, "3", "3"), ({"type": "integer"}, "3", 3), (True, "3", 3), (True, "x", "x")],
)
def test_arguments_between_tags_have_the_type_that_was_declared(schema, value, read) -> None:
    syntax = CallSyntax("<call>", "</call>", "<call>", ("<key>", "</key><value>", "</value>"))
    tools = declarations([{"name": "add", "parameters": {"properties": {"a": schema}}}])
    text = f"<call>add<key>a</key><value>{value}</value></call>"
    _, [call] = syntax.parse(f"so: {text}", tools)
    assert call["function"] == {"name": "add", "arguments": {"a": read}}


MARKUP = "<script>alert(1)</script>"


def test_attacks_are_refused(serving, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(app, "BODY_BYTES", 10_000)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    with serving(tmp_path / "s.db") as url:
        path, headers = PATH, HEADERS
        body = {"model": "tiny", "messages": HI, "max_tokens": 2}

        def status(path=path, method="POST", json=body, **changes) -> int:
            given = {k: v for k, v in {**headers, **changes}.items() if v is not None}
            reply = httpx.request(method, url + path, json=json, headers=given)
            assert "text/html" not in reply.headers["content-type"]
            assert MARKUP not in reply.text or "application/json" in reply.headers["content-type"]
            assert TOKEN not in reply.text
            assert "access-control-allow-origin" not in reply.headers
            return reply.status_code

        assert status() == status(origin=url) == 200
        for origin in ("http://evil.example", "null", "http://["):
            assert status(origin=origin) == 403
        assert status(host="evil.example") == 403
        for key in (None, "Bearer " + TOKEN[:-1], f"Bearer {TOKEN}x", b"Bearer \xff"):
            assert status(authorization=key) == 401
        assert status("/metrics", "GET", None, authorization=None) == 401
        assert status(**{"content-type": "text/plain"}) == 415  # what a page of others may send unasked
        assert status(json={**body, "user": "x" * 20_000}) == 413
        for tricky in ("/s/%2e%2e/v1/models", "/s/a%2fb/v1/models", "/v1/../../etc/passwd"):
            assert status(tricky, "GET", None) in (400, 404)
        assert status(f"/s/{'a' * 81}/v1/models", "GET", None) == 400
        assert status(f"/s/{MARKUP}/v1/chat/completions") in (400, 404)
        assert status(path, "GET", None) == 405
        assert status(json={**body, "model": MARKUP, "user": MARKUP}) == 200
        assert status(json={**body, MARKUP: MARKUP}) == 400
        assert status("/v1/feedback", json={"id": MARKUP, "reward": 1}) == 400
        for wrong in (b"{", b"[]", b'{"a": NaN}', b"[" * 9_000, b"\xff", b'{"model": "\\ud800"}'):
            reply = httpx.post(
                url + path, content=wrong, headers={**headers, "content-type": "application/json"}
            )
            assert reply.status_code == 400
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as slow:
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n"
            slow.sendall(f"{head}content-type: application/json\r\ncontent-length: 500\r\n\r\n{{".encode())
            assert b" 408 " in slow.recv(1000)
        assert status() == 200
    assert all(TOKEN not in json.dumps(s.meta) for s in stored(tmp_path))


FULL = Unwritable("/somewhere/s.db: the disk is full")


@pytest.mark.parametrize(("error", "status"), [(OSError("disk full"), 500), (FULL, 503)])
def test_nothing_comes_before_it_is_stored(url, monkeypatch, tmp_path, capfd, error, status) -> None:
    """Where the store refuses, the client gets an error and no end of an answer, and not the store's name."""

    def fails(*args, **fields):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("agro.door.app.store_row", fails)
        reply, stream = (post(url, max_tokens=3, stream=stream) for stream in (False, True))
    ask(url)
    assert reply.status_code == status
    assert "[DONE]" not in stream.text
    assert 'finish_reason": "' not in stream.text
    for text in (reply.text, stream.text):
        assert ("the answer can't be stored" in text) == (error is FULL)
        assert "somewhere" not in text
    assert ("the disk is full" in capfd.readouterr().err) == (error is FULL)
    assert len(stored(tmp_path)) == 1


def test_who_leaves_while_an_answer_is_stored_ends_nothing_else(tmp_path) -> None:
    writer = Recorder(Keeping(str(tmp_path / "s.db")), Memory(), "m")
    may_go = threading.Event()

    async def run() -> str:
        waits = asyncio.wrap_future(writer.submit(lambda store: may_go.wait(20)))
        leaves = asyncio.wrap_future(writer.submit(lambda store: done.append(True)))
        await asyncio.sleep(0.05)
        waits.cancel()
        leaves.cancel()
        await asyncio.sleep(0.05)
        may_go.set()
        return await asyncio.wait_for(asyncio.wrap_future(writer.submit(lambda store: "stored")), 20)

    done: list[bool] = []
    with closing(writer):
        assert asyncio.run(run()) == "stored"
    assert done == [True]


def test_an_error_of_the_batch_reaches_all_that_are_in_it(serving, engine, monkeypatch) -> None:
    """Also who ended in the step that failed."""

    def fails(self, done):
        raise OSError("out of memory")

    with serving(seconds=20) as url, ThreadPoolExecutor(4) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("agro.door.batch.MixedRows.finish_of", fails)
            replies = list(pool.map(lambda limit: post(url, max_tokens=limit), (3, 3, 90, 90)))
        assert [reply.status_code for reply in replies] == [500] * 4
        assert post(url, max_tokens=3, stream=True).text.endswith("[DONE]\n\n")


def test_a_reader_that_stalls_holds_nobody_up(serving) -> None:
    with serving(size=1) as url:
        body = {"model": "m", "messages": HI, "max_tokens": 1900, "stream": True, "top_logprobs": 20}
        with httpx.stream("POST", url + PATH, json=body, headers=HEADERS, timeout=60) as stalled:
            next(stalled.iter_bytes())
            assert ask(url)["choices"]


def test_what_is_remembered_is_bounded_by_its_size(engine, monkeypatch) -> None:
    monkeypatch.setattr("agro.door.sessions.REMEMBERED_CHARACTERS", 1000)
    sessions = Sessions(engine.policy.encoder)
    for _ in range(50):
        call = sessions.begin([{"role": "user", "content": "x" * 100}], None)
        sessions.end(call, [Token(5, -1.0, 0)], {"role": "assistant", "content": "a"})
    assert sum(map(len, sessions._answered.values())) <= 5


def test_loops_of_their_own(serving) -> None:
    """Many requests of one asynchronous client."""

    async def run(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": "tiny", "messages": HI, "max_tokens": 5}
            calls = [client.post(url + PATH, json=body, headers=HEADERS) for _ in range(20)]
            return [reply.status_code for reply in await asyncio.gather(*calls)]

    with serving() as url:
        assert asyncio.run(run(url)) == [200] * 20


def test_old_answers_are_deleted_and_feedback_on_them_says_so(serving, monkeypatch, tmp_path, capfd) -> None:
    file = tmp_path / "s.db"
    with serving(file) as url, monkeypatch.context() as patch:
        patch.setattr("agro.door.sessions.time.time", lambda: time.time_ns() / 1e9 - 40 * 86400)
        first = ask(url, path=WORK)
        ask(url, [*HI, turn(first), *HI], path=WORK)  # what the row was before is deleted too
        assert feedback(url, id=first["id"], correction="Hello").status_code == 200
    with serving(file) as url:
        young = ask(url)
    with serving(file, days=30) as url:
        assert "deleted 4 rows, 30 days old or more" in capfd.readouterr().err
        assert metric(url, "expired_total") == 4
        for name in ({"session": "work"}, {"id": first["id"]}):
            reply = feedback(url, reward=1, **name)
            assert (reply.status_code, "were deleted" in reply.text) == (410, True)
        assert feedback(url, id=young["id"], reward=1).status_code == 200
        again = ask(url, path=WORK)
    assert again["id"] != first["id"]  # a late word on the first isn't taken for one on this
    assert len(stored(tmp_path)) == 2
    assert b"Hello" not in file.read_bytes()


def test_a_row_is_deleted_while_it_serves(serving, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("agro.door.sessions.DAY", 0.2)
    with serving(tmp_path / "s.db", days=5) as url:
        ask(url)
        deadline = time.monotonic() + 30
        while metric(url, "expired_total") == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ask(url)


def test_each_token_has_the_version_of_its_weights_also_where_they_change_in_an_answer(
    serving, engine, monkeypatch, tmp_path, capfd
) -> None:
    """The origin of the expected log-probs: passes of the model itself, with the first weights up to the last
    token but one that they drew, then with the new ones after the keys and values of the first."""
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.01)
    first = {name: weight.clone() for name, weight in engine.policy.model.state_dict().items()}
    engine.policy.save(tmp_path / "7")
    with torch.no_grad():
        for weight in engine.policy.model.parameters():
            weight.mul_(1.5)
    engine.policy.save(tmp_path / "9")
    engine.load(tmp_path / "7", 7)
    newest, looks, fetched = [tmp_path / "8"], Counter(), Counter()  # 8 isn't there: those of before serve on

    @contextmanager
    def fetch(folder):
        fetched[folder.name] += 1
        yield folder

    def look():
        looks[newest[0].name] += 1
        if looks.total() == 1:
            raise TypeError("a record of another version")
        return int(newest[0].name), fetch(newest[0])

    try:
        with serving(tmp_path / "s.db", newest=look) as url:
            body = {"model": "m", "messages": HI, "max_tokens": 1900, "seed": 1, "stream": True}
            with httpx.stream("POST", url + PATH, json=body, headers=HEADERS, timeout=60) as reply:
                lines = reply.iter_lines()
                for _ in range(40):
                    next(lines)
                newest[0] = tmp_path / "9"
                rest = list(lines)
            assert rest[-2] == "data: [DONE]"
            seen, deadline = looks["9"], time.monotonic() + 30
            while looks["9"] < seen + 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert fetched["9"] == 1
            after = ask(url, seed=2)
        answer, second = stored(tmp_path)
        versions = np.asarray(answer.version)[answer.action]
        changed = int((versions == 7).sum())
        place = int(answer.action.argmax()) + changed - 1  # of the last token that the first weights drew
        tokens, model, cache = torch.tensor(answer.tokens[None]).long(), engine.policy.model, DynamicCache()
        with torch.no_grad():
            model.load_state_dict(first)
            logits = [model(tokens[:, :place], past_key_values=cache).logits]
            engine.load(tmp_path / "9", 9)
            logits += [model(token, past_key_values=cache).logits for token in tokens[:, place:].split(1, 1)]
    finally:
        engine.policy.model.load_state_dict(first)
        engine.version = -1
    assert 0 < changed < len(versions)
    assert versions.tolist() == [7] * changed + [9] * (len(versions) - changed)
    assert second.version == 9
    assert after["choices"][0]["message"]["content"] == second.response
    assert_log_probs(answer, torch.cat(logits, 1)[0, :-1], atol=1e-3)
    said = capfd.readouterr().err
    assert f"still serving version 7: {tmp_path / '8'}" in said
    assert f"serving version 9, {tmp_path / '9'}" in said
