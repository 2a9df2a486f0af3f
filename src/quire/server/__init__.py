"""The engine over HTTP: OpenAI's and Anthropic's routes, on any ASGI server.

Begin with ``app.py``, which lists the routes. A request's way: ``connections.py`` cuts the bytes,
``route_handler.py`` decides who may come in and reads the body, ``wire/body.py`` checks its fields,
an endpoint asks ``endpoints/generation.py`` for what the engine generates, and ``wire/streams.py``
sends it.
"""
