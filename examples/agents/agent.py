"""An agent of its own, written against OpenAI's package: it knows nothing of agro.

It looks a key up with a tool, says the value, and doubles it: three calls of the model.
"""

import json
import os
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "value of a key",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]


def run(client: OpenAI, question: str, table: dict[str, str]) -> list[str]:
    """What the agent found: the key that was looked up, the value, twice the value."""
    messages = [{"role": "user", "content": question}]
    settings = {"model": "policy", "tools": TOOLS, "max_tokens": 64}
    message = client.chat.completions.create(messages=messages, **settings).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        return ["", message.content or "", ""]
    call = message.tool_calls[0]
    key = str(json.loads(call.function.arguments).get("key"))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": table.get(key, "?")})
    found = client.chat.completions.create(messages=messages, **settings).choices[0].message
    messages += [{"role": "assistant", "content": found.content}, {"role": "user", "content": "twice?"}]
    twice = client.chat.completions.create(messages=messages, **settings).choices[0].message
    return [key, found.content or "", twice.content or ""]


if __name__ == "__main__":  # one task: of the arguments, or of a run (environment.name = "harness:…")
    columns = json.loads(
        os.environ.get("AGRO_COLUMNS") or json.dumps({"key": sys.argv[1], "value": sys.argv[2]})
    )
    key, value = columns["key"], columns["value"]
    said = run(OpenAI(), f"{key}?", {key: value})
    right = [key, value, str(2 * int(value))]
    reward = sum(a == b for a, b in zip(said, right)) / 3
    if "AGRO_RESULT" in os.environ:
        with open(os.environ["AGRO_RESULT"], "w") as file:
            json.dump({"reward": reward}, file)
    print(said, reward)
