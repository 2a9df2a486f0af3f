"""OpenAI's Agents: runs with tools, forms and streams, over responses and chat completions.

    python tests/clients/ask_openai_agents.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

import asyncio
from importlib.metadata import version
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from client_answer import Answer
from client_flags import client_flags
from openai import AsyncOpenAI


@function_tool
def look(far: bool) -> str:
    """Look around."""
    return "a hill" if far else "a wall"


def agent(model: Model, **more: Any) -> Agent[None]:
    settings = ModelSettings(max_tokens=90, temperature=0, tool_choice=more.pop("choice", None))
    return Agent(name="one", instructions="Be short.", model=model, model_settings=settings, **more)


async def streamed(asked: Agent[None]) -> str:
    run = Runner.run_streamed(asked, "Hello")
    return "".join(
        [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
    )


async def forms(model: Model) -> None:
    formed = agent(model, output_type=Answer)
    answer = (await Runner.run(formed, "Hello")).final_output
    assert isinstance(answer, Answer)
    assert Answer.model_validate_json(await streamed(formed)) == answer


async def tools(model: Model) -> None:
    stop = StopAtTools(stop_at_tool_names=["look"])
    calling = agent(model, tools=[look], choice="required", tool_use_behavior=stop)
    run = await Runner.run(calling, "Hello")
    assert run.final_output in ("a hill", "a wall")
    assert {"tool_call_item", "tool_call_output_item"} <= {item.type for item in run.new_items}
    told = [*run.to_input_list(), {"role": "user", "content": "And now?"}]
    assert isinstance(
        (await Runner.run(agent(model, output_type=Answer), told)).final_output, Answer
    )


async def texts(model: Model) -> None:
    plain = agent(model)
    assert await streamed(plain) == (await Runner.run(plain, "Hello")).final_output


async def main() -> None:
    options = client_flags().parse_args()
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{options.base_url}/v1", api_key=options.api_key)
    chats = OpenAIChatCompletionsModel(options.model, client)
    await texts(chats)  # over responses it takes a text that is cut for an error
    for model in (chats, OpenAIResponsesModel(options.model, client)):
        await forms(model)
        await tools(model)
    print(f"openai-agents {version('openai-agents')}: runs, streams, forms, tools; two APIs")


if __name__ == "__main__":
    asyncio.run(main())
