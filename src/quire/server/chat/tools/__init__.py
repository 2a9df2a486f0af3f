"""Tool calls in generated text: one reader for each format, under vLLM's names.

``declared.py`` checks the tools of a request, ``choice.py`` what it says about using them; the
formats are in ``objects.py`` (calls as JSON objects), ``named.py`` (a name, and JSON after it) and
``tagged.py`` (each argument in tags of its own); ``formats.py`` has their names.
"""
