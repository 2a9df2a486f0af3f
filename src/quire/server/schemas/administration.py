"""``/is_sleeping`` and ``/load``, as vLLM has them."""

import msgspec


class Sleeping(msgspec.Struct, kw_only=True):
    is_sleeping: bool


class Load(msgspec.Struct, kw_only=True):
    server_load: int
