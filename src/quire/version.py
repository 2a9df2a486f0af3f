"""The one place that has Quire's version: the package, the command and the server read it here.

A release gives it a new number, and the same one to ``CHANGELOG.md`` and ``CITATION.cff``, with the
day; ``tests/test_package.py`` compares them.
"""

VERSION = "0.1.0"
