"""OpenAI's Agents SDK with a tool: by chat completions, by Responses, and as a stream of these."""

import asyncio

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)
    agent = Agent("adder", instructions="be brief", tools=[add], model="m")
    for interface in ("chat_completions", "responses"):
        set_default_openai_api(interface)
        print((await Runner.run(agent, "3 + 1?")).final_output)
    streamed = Runner.run_streamed(agent, "3 + 1?")
    async for _ in streamed.stream_events():
        pass
    print(streamed.final_output)


asyncio.run(main())
