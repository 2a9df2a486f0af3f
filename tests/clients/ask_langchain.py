"""LangChain's chat model: whole, in pieces, with tools, and with an answer in a given form.

    python tests/clients/ask_langchain.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

from importlib.metadata import version

from client_answer import Answer
from client_flags import client_flags
from langchain_openai import ChatOpenAI, OpenAI

if __name__ == "__main__":
    options = client_flags().parse_args()
    own = {"base_url": f"{options.base_url}/v1", "api_key": options.api_key, "temperature": 0}
    chat = ChatOpenAI(model=options.model, max_tokens=90, **own)
    whole = chat.invoke([("system", "Be short."), ("human", "Hello")])
    assert whole.usage_metadata["output_tokens"] > 0
    parts = list(chat.stream([("system", "Be short."), ("human", "Hello")]))
    assert "".join(part.content for part in parts) == whole.content
    for method in ("json_schema", "function_calling"):
        answer = chat.with_structured_output(Answer, method=method).invoke("Hello")
        assert isinstance(answer, Answer), method
    called = chat.bind_tools([Answer], tool_choice="required").invoke("Hello")
    assert called.tool_calls[0]["name"] == "Answer"
    over = ChatOpenAI(model=options.model, max_tokens=90, use_responses_api=True, **own)
    assert over.invoke("Hello").text
    assert OpenAI(model=options.model, max_tokens=8, **own).invoke("def add(a, b):")
    print(f"langchain-openai {version('langchain_openai')}: chats, tools, forms, responses, texts")
