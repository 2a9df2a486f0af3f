"""Pydantic AI: agents over chat completions, responses and messages, with tools and forms.

    python tests/clients/ask_pydantic_ai.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

import asyncio
from importlib.metadata import version

from anthropic import AsyncAnthropic
from client_answer import Answer
from client_flags import client_flags
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


async def converse(model: Model, settings: ModelSettings) -> None:
    """One that answers in its own words, whole and in pieces."""
    agent = Agent(model, instructions="Be short.", model_settings=settings)
    whole = await agent.run("Hello")
    assert whole.usage.output_tokens > 0
    async with agent.run_stream("Hello") as parts:
        said = "".join([part async for part in parts.stream_text(delta=True, debounce_by=None)])
    assert said == whole.output
    again = await agent.run("And now?", message_history=whole.all_messages())
    assert again.usage.input_tokens > whole.usage.input_tokens


async def call(model: Model, settings: ModelSettings) -> None:
    """One whose answer is a call, and one whose answer is a document."""
    for form in (ToolOutput(Answer), NativeOutput(Answer)):
        agent = Agent(model, output_type=form, model_settings=settings, retries=0)
        assert isinstance((await agent.run("Hello")).output, Answer), form
        async with agent.run_stream("Hello") as parts:
            assert isinstance(await parts.get_output(), Answer), form


async def main() -> None:
    options = client_flags().parse_args()
    own = AsyncOpenAI(base_url=f"{options.base_url}/v1", api_key=options.api_key)
    provider = OpenAIProvider(openai_client=own)
    settings = ModelSettings(max_tokens=90, temperature=0)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(options.model, provider=provider)
        await converse(model, settings)
        await call(model, settings)
    other = AsyncAnthropic(base_url=options.base_url, api_key=options.api_key)
    model = AnthropicModel(options.model, provider=AnthropicProvider(anthropic_client=other))
    await converse(model, settings)
    print(f"pydantic-ai {version('pydantic-ai-slim')}: agents, streams, tools, forms; three APIs")


if __name__ == "__main__":
    asyncio.run(main())
