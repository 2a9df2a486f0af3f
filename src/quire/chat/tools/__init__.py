"""Tool calls in generated text: one reader for each format, under vLLM's names.

``formats.py`` is the table of them: what their marks are, and how one is found. ``format.py`` says
what a format is, and the readers are in ``objects.py`` (calls as JSON objects), ``named.py`` (a
name, and JSON after it), ``tagged.py`` (each argument in tags of its own) and ``literals.py``
(Python's and Gemma's notation). gpt-oss' calls are messages; ``harmony.py`` beside this package
reads those. ``declared.py`` checks the tools of a request, ``choice.py`` what it says about using
them.
"""
