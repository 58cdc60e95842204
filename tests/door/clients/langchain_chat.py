"""A tool of LangChain's, then a stream."""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


model = ChatOpenAI(model="m", max_retries=0)
history = [HumanMessage("3 + 1?")]
history.append(model.bind_tools([add]).invoke(history))
history += [add.invoke(call) for call in history[-1].tool_calls]
print(model.bind_tools([add]).invoke(history).content)
print("".join(part.content for part in model.stream("count")))
