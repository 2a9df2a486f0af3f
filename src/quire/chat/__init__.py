"""From messages to a prompt, and from generated text to reasoning, content and tool calls.

Begin with ``chat.py``, the only module that the endpoints need: ``Chat`` makes a ``ChatPrompt`` of
a ``ChatRequest``, and a ``Reader`` that is fed with generated text. There is no HTTP here and no
engine. ``templates.py`` writes prompts; ``tape.py`` reads text that comes in pieces, for
``reasoning.py``, ``tools`` and ``harmony.py``; ``anthropic.py`` and ``responses.py`` translate what
the other two interfaces call messages.
"""
