"""The programs of OpenAI and Anthropic for Python, unchanged, against `agro serve`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from asking import HI, TOKEN, stored

openai = pytest.importorskip("openai", reason="the client of OpenAI isn't installed: pip install '.[door]'")
anthropic = pytest.importorskip("anthropic", reason="that of Anthropic isn't: pip install '.[door]'")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


@pytest.fixture
def client(url):
    """OpenAI's."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(url):
    """Anthropic's."""
    with anthropic.Anthropic(base_url=url, api_key=TOKEN, max_retries=0) as client:
        yield client


def test_chat_completions_with_a_tool_make_one_row(client, says, tmp_path) -> None:
    says(f"let me see {CALL}", "it is 4")
    reply = client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    message, choice = reply.choices[0].message, reply.choices[0]
    assert (message.content, choice.finish_reason) == ("let me see", "tool_calls")
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 3}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    reply = client.chat.completions.create(model="m", messages=[*HI, message, result], tools=TOOLS)
    assert reply.choices[0].message.content == "it is 4"
    [row] = stored(tmp_path)
    assert (row.meta["turns"], row.meta["tool_calls"]) == (2, 0)
    assert row.response.startswith(f"let me see {CALL}")
    assert row.meta["continuation"][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3}}


def test_a_stream_of_chat_completions_has_the_call_and_no_syntax(client, says) -> None:
    says(f"let me see {CALL}")
    asked = {"model": "m", "messages": HI, "tools": TOOLS}
    with client.chat.completions.stream(**asked) as stream:
        completion = stream.get_final_completion()
    message = completion.choices[0].message
    assert message.content.strip() == "let me see"
    assert message.tool_calls[0].function.arguments == '{"a": 3}'


def test_what_cannot_be_read_stays_text(client, says) -> None:
    read = [CALL.replace("3", number) for number in ("NaN", "1e999")]  # which Python reads, and JSON hasn't
    for text in (*read, CALL[:40], CALL.replace('"add"', "3")):
        says(text)
        reply = client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
        assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (text, None)


def test_messages_of_anthropic_with_a_tool_make_one_row(claude, says, tmp_path) -> None:
    tools = [{"name": "add", "description": "the sum", "input_schema": SCHEMA}]
    asked = {"model": "m", "max_tokens": 200, "system": "be brief", "tools": tools}
    says(CALL, "it is 4")
    reply = claude.messages.create(messages=HI, **asked)
    [use] = reply.content
    assert (use.type, use.name, use.input, reply.stop_reason) == ("tool_use", "add", {"a": 3}, "tool_use")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "4"}]}
    history = [*HI, {"role": "assistant", "content": reply.content}, result]
    with claude.messages.stream(messages=history, **asked) as stream:
        text, last = "".join(stream.text_stream), stream.get_final_message()
    assert (text, last.content[0].text, last.stop_reason) == ("it is 4", "it is 4", "end_turn")
    [row] = stored(tmp_path)
    assert row.meta["turns"] == 2
    assert [m["role"] for m in row.prompt] == ["tools", "system", "user"]


def test_a_stream_of_messages_has_its_blocks(claude, says) -> None:
    tools = [{"name": "add", "input_schema": SCHEMA}]
    says(f"so: {CALL}")
    with claude.messages.stream(model="m", max_tokens=200, messages=HI, tools=tools) as stream:
        last = stream.get_final_message()
    assert [block.type for block in last.content] == ["text", "tool_use"]
    assert last.content[1].input == {"a": 3}


def test_responses_with_a_tool_make_one_row(client, says, tmp_path) -> None:
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    says(CALL, "it is 4")
    reply = client.responses.create(model="m", input=HI, instructions="be brief", tools=tools)
    [call] = reply.output
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 3}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    asked = {"model": "m", "input": [*HI, call, result], "instructions": "be brief", "tools": tools}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert last.output_text == "it is 4"
    assert kinds[-1] == "response.completed"
    [row] = stored(tmp_path)
    assert row.meta["turns"] == 2


def test_errors_are_those_of_the_services(client, claude) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=HI, temperature=3)
    with pytest.raises(openai.AuthenticationError, match="expected the door's token as API key"):
        client.with_options(api_key="wrong").chat.completions.create(model="m", messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="m", messages=HI, max_tokens=0)
    with pytest.raises(anthropic.AuthenticationError, match="expected the door's token as API key"):
        claude.with_options(api_key="wrong").messages.create(model="m", messages=HI, max_tokens=5)
    for each in (client, claude):
        assert [model.id for model in each.models.list()] == ["tiny"]


def test_the_agent_of_the_examples_makes_one_row(client, says, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples/agents"))
    agent = importlib.import_module("agent")
    says('<tool_call>\n{"name": "get", "arguments": {"key": "ab"}}\n</tool_call>', "7", "14")
    assert agent.run(client, "ab?", {"ab": "7"}) == ["ab", "7", "14"]
    [row] = stored(tmp_path)
    assert row.meta["turns"] == 3
    assert [m["content"] for m in row.meta["continuation"]] == ["", "7", "7", "twice?", "14"]
