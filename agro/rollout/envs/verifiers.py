"""Environments of the `verifiers` library (PrimeIntellect; 0.1.14): `environment.name = "verifiers:ENV_ID"`.

The library runs its own rollout and requests each response from a client, which waits for the policy's next
turn. Prompts come from the environment's data set: `python -m agro.rollout.envs.verifiers ENV_ID FILE.jsonl
[KEY=VALUE …]` writes them. The reward is the rubric's at the end of the rollout, and 0 for an episode that
agro ends earlier (truncation, environment.max_turns, the context).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from agro.errors import Refused
from agro.rollout.envs import Turn
from agro.types import Messages, Prompt

MODEL = "agro"


def library() -> Any:
    """The module `verifiers`. Raises `Refused` if it is missing or has another version."""
    try:
        import verifiers
        from verifiers.clients import Client  # noqa: F401
    except ImportError as error:
        raise Refused(
            "environment.name: verifiers:… needs version 0.1.14 of the library verifiers: "
            f"pip install 'verifiers>=0.1.14,<0.2' ({error})"
        ) from None
    return verifiers


class Verifiers:
    """The environment `id`. `options` are keyword arguments of its `load_environment`."""

    stop: tuple[str, ...] = ()

    def __init__(self, id: str, options: Mapping[str, Any]) -> None:
        try:
            self.program = library().load_environment(id, **options)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"environment.name: verifiers:{id} can't be loaded with options {', '.join(options)}: {error}"
            ) from error
        self.name = f"verifiers:{id}"
        if getattr(self.program, "tool_defs", None):
            raise Refused(
                f"environment.name: {self.name} needs a model's server that parses tool calls, but "
                "agro gives plain text. Use an environment whose tools are called in the text"
            )
        self.loop = asyncio.new_event_loop()

    def reset(self, prompt: Prompt) -> VerifiersRollout:
        rollout = VerifiersRollout(self, {"example_id": 0, **prompt.columns, "prompt": prompt.text})
        opening = plain(self.loop.run_until_complete(rollout.next_request()))
        if opening != (prompt.text if isinstance(prompt.text, list) else plain(prompt.text)):
            raise ValueError(
                f"the environment starts with {opening!r:.80} instead of the prompt; write its own prompts"
            )
        return rollout

    def step(self, state: VerifiersRollout, text: str) -> Turn:
        count = len(state.messages)
        messages = self.loop.run_until_complete(state.answer(text))
        if messages is None:
            return Turn(reward=state.reward(), done=True)
        new = plain(messages)[count + 1 :]  # after the earlier conversation and the policy's turn
        if len(new) != 1:
            raise ValueError(f"expected one message between two turns, got {new!r:.200}")
        return Turn(new[0]["content"], 0.0, role=new[0]["role"])

    def prompts(self) -> list[dict[str, Any]]:
        """The environment's data set as lines of a prompts file."""
        lines = []
        for row in self.program.get_dataset():
            line = {k: v for k, v in row.items() if v is not None}
            prompt_id = f"{self.name}/{line['example_id']}"
            lines.append({**line, "prompt": plain(line["prompt"]), "prompt_id": prompt_id})
        return lines


class VerifiersRollout:
    """One rollout of the library, which waits for each response."""

    def __init__(self, environment: Verifiers, task: dict[str, Any]) -> None:
        self.messages: Sequence[Any] = []
        self._requests: asyncio.Queue[tuple[Sequence[Any], asyncio.Future[str]]] = asyncio.Queue()
        rollout = environment.program.run_rollout(task, _client(self._requests), MODEL, {})
        self._loop = environment.loop
        self._task = self._loop.create_task(rollout)
        self._reply: asyncio.Future[str] | None = None

    def __del__(self) -> None:
        cancelled = self._task.cancel()  # the episode ended before the rollout, which cleans up
        if cancelled and not self._loop.is_closed():
            self._loop.run_until_complete(asyncio.wait([self._task]))

    async def next_request(self) -> Sequence[Any] | None:
        """The messages of the next request; None at the end of the rollout."""
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([request, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            if error := self._task.result().get("error"):
                raise RuntimeError(f"{error!s:.300}")
            return None
        self.messages, self._reply = request.result()
        return self.messages

    async def answer(self, text: str) -> Sequence[Any] | None:
        assert self._reply is not None
        self._reply.set_result(text)
        return await self.next_request()

    def reward(self) -> float:
        return float(self._task.result()["reward"])


def _client(requests: asyncio.Queue[Any]) -> Any:
    """A client of the library that puts its requests into a queue and waits for the responses."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Waiting(Client):  # type: ignore[misc]
        async def get_response(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            reply = asyncio.get_running_loop().create_future()
            requests.put_nowait((prompt, reply))
            message = ResponseMessage(content=await reply, finish_reason="stop", is_truncated=False)
            return Response(id="", created=0, model=MODEL, message=message)

    Waiting.__abstractmethods__ = frozenset()  # methods for servers aren't needed
    return Waiting(None)


def plain(messages: Any) -> Messages:
    """Messages of the library as role and text."""
    if isinstance(messages, str):
        return [{"role": "text", "content": messages}]
    result = []
    for message in messages or []:
        m = message if isinstance(message, dict) else message.model_dump()
        if not isinstance(m["content"], str):
            raise ValueError(f"expected a message of text, got {m['content']!r:.80}")
        result.append({"role": m["role"], "content": m["content"]})
    return result


def main(arguments: Sequence[str]) -> None:
    if len(arguments) < 2:
        sys.exit("usage: python -m agro.rollout.envs.verifiers ENV_ID FILE.jsonl [KEY=VALUE …]")
    options = {k: json.loads(v) for k, _, v in (item.partition("=") for item in arguments[2:])}
    rows = Verifiers(arguments[0], options).prompts()
    with open(arguments[1], "x", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"{len(rows)} prompts in {arguments[1]}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
