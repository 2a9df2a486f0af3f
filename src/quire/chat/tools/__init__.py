"""Tool calls in generated text: one reader for each format, under vLLM's names.

``registry.py`` has the table: the marks of each format, and how a model's is found.
``tool_format.py`` says what a format is. The readers are in ``json_objects.py`` (calls as JSON
objects), ``registry.py`` (a name, and JSON after it), ``tagged.py`` (each argument in tags of its
own) and ``literals.py`` (Python's and Gemma's notation); ``harmony.py`` beside this package reads
gpt-oss' calls, which are messages. ``declared.py`` checks a request's tools, ``tool_choice.py``
which of them must be called.
"""
