"""From messages to a prompt, and from generated text to reasoning, content and tool calls.

Begin with ``conversation.py``, which is all that most endpoints need: ``Chat`` makes a
``ChatPrompt`` of a ``ChatInput``, and a ``Reader`` for the generated text. There is no HTTP here
and no engine. ``templates.py`` writes prompts; ``lexer.py`` reads text that comes in pieces, for
``reasoning_parsers.py``, ``tools`` and ``harmony.py``; ``api_inputs.py`` translates the messages of
the other two interfaces.
"""
