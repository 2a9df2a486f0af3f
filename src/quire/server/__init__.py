"""The engine over HTTP: OpenAI's and Anthropic's routes, on any ASGI server.

Begin with ``app.py``. A request's way: ``guard`` (who asks, and is there room in the queue),
``wire`` (what is asked, checked), an endpoint, ``Service.run`` (the engine), and ``wire`` again.
"""
