"""What commands that ask a server share: where it is, its key, and how long it may say nothing."""

from typing import Annotated, TypeAlias

import typer

from quire.config.keys import key_for
from quire.http import Http

DEFAULT_URL = "http://127.0.0.1:8000"

Url: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="QUIRE_URL",
        help="Any server of OpenAI's API; quire serve is there by default.",
    ),
]
ApiKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="If the server wants one; @FILE reads it. Default: QUIRE_API_KEY for a server on this "
        "machine or at QUIRE_URL, OPENAI_API_KEY for that of OPENAI_BASE_URL."
    ),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(min=1, help="Seconds that the server may say nothing.")
]


def client(
    url: str, api_key: str | None, timeout_s: float, headers: dict[str, str] | None = None
) -> Http:
    """Raises: ConfigError for what is no address, or no key."""
    http = Http(url, headers, timeout_s=timeout_s)
    key = key_for(url, api_key)
    if key is not None:
        http.headers.setdefault("Authorization", f"Bearer {key}")
    return http
