"""Tool calls in generated text: one reader for each format, under vLLM's names.

``registry.py`` is the table of them: what their marks are, and how one is found. ``tool_format.py``
says what a format is. The readers are in ``json_objects.py`` (calls as JSON objects), in
``registry.py`` (a name, and JSON after it), ``tagged.py`` (each argument in tags of its own) and
``literals.py`` (Python's and Gemma's notation). gpt-oss' calls are messages: ``harmony.py`` beside
this package reads those. ``declared.py`` checks the tools of a request, ``tool_choice.py`` what it
says about using them.
"""
