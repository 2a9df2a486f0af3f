"""A chat whose history stays in the cache: each turn computes only what is new in it.

Run: python examples/chat.py [MODEL]

The whole conversation is the prompt of each turn. The prefix cache finds the turns before by their
tokens, so there is nothing to keep but the messages.
"""

import sys

import quire

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model, which continues Python
QUESTIONS = (
    "def read_lines(path):",
    "def write_lines(path, lines):",
    "class LineReader:",
)

with quire.LLM(MODEL) as llm:
    # Models have an end token; the demo model, which has none, names the texts that end an answer.
    stop = llm.tokenizer.init_kwargs.get("chat_stop_strings", ())
    params = quire.SamplingParams(max_tokens=60, temperature=0, stop=stop)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = llm.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        token_ids = llm.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        print(f"> {question.strip()}")
        answer, cached = "", 0
        for delta in llm.stream([token_ids], params):
            print(delta.text, end="", flush=True)
            answer, cached = answer + delta.text, delta.num_cached_tokens
        messages.append({"role": "assistant", "content": answer})
        print(f"\n[{cached} of {len(token_ids)} tokens of the prompt were in the cache]\n")
