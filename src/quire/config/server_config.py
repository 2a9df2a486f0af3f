"""Define the options of a server: where it listens, its keys, and its limits."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from quire.config.environment import EnvironmentValue, is_empty, read, said
from quire.config.keys import IS_KEY, is_loopback, parse_keys
from quire.config.option import ADVANCED, in_range, one_of, option, seconds
from quire.errors import ConfigError
from quire.units import parse_bytes

LOOPBACK = "127.0.0.1"
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")
_DOMAIN = re.compile(r"\*|[a-zA-Z0-9_.-]+(:[0-9]{1,5})?")
_SOCKET_PATH_BYTES = 107  # longest path of a Unix socket
_UDS_MODE = "660"
# Panels of the help.
_LISTENING, _CLIENTS, _MODEL, _LIMITS, _LOGS = "Listening", "Clients", "Model", "Limits", "Logs"
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_AT_LEAST: Mapping[str, int] = MappingProxyType(
    {
        "max_num_queued_reqs": 1,
        "max_num_queued_tokens": 1,
        "max_num_reqs_per_key": 1,
        "max_request_bytes": 1024,
        "max_logprobs": 0,
        "max_stored_response_bytes": 0,
        "max_background_responses": 0,
        "timeout_keep_alive": 1,
    }
)


def _texts(text: str) -> tuple[str, ...]:
    """Parse a JSON list, as in vLLM, or texts with commas between them. Raises: ConfigError."""
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(","))
    try:
        parts = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not JSON: {error}") from error
    if not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{text!r} must be a list of texts")
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of a server. Raises: ConfigError with the option, its value and its limit.

    Neither ``repr`` nor an error shows a key.
    """

    host: str = option(
        LOOPBACK,
        "Address that the server listens on; 0.0.0.0 is all addresses of this machine.",
        panel=_LISTENING,
    )
    port: int = option(
        8000, "Port that the server listens on; 0 takes a free port.", panel=_LISTENING
    )
    uds: str | None = option(
        None,
        "Path of a Unix socket that the server listens on instead of --host and --port.",
        panel=_LISTENING,
    )
    uds_mode: str = option(
        _UDS_MODE,
        "Permissions of --uds as for chmod: 660 admits this user and the socket's group, 666 every "
        "user of the machine.",
        panel=_LISTENING,
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the certificate for HTTPS. Default: plain HTTP.", panel=_LISTENING
    )
    ssl_keyfile: str | None = option(
        None,
        "PEM file with the certificate's private key. Default: --ssl-certfile has it too.",
        panel=_LISTENING,
    )
    root_path: str = option(
        "", "Path prefix that a proxy in front of the server removes, e.g. /llm.", panel=ADVANCED
    )
    api_key: tuple[str, ...] = option(
        (),
        "API key that clients must send, or @FILE with one key per line, which ps does not show. "
        "May be given several times. Default: VLLM_API_KEY, or no key.",
        secret=True,
        flag_type=list[str] | None,
        parse=parse_keys,
        panel=_CLIENTS,
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "API key of the operator, or @FILE. Once set, only this key allows administration, "
        "/metrics and the view of all clients' sequences.",
        secret=True,
        flag_type=list[str] | None,
        parse=partial(parse_keys, option="admin_api_key"),
        panel=_CLIENTS,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin of web pages that may send requests, e.g. https://ui.example; * allows all. May be "
        "given several times.",
        flag_type=list[str] | None,
        parse=_texts,
        panel=_CLIENTS,
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Host that pictures of requests may be fetched from, e.g. images.example.org, or "
        "images.example.org:8443; * allows all. Its addresses must be public. May be given several "
        "times. Default: none.",
        flag_type=list[str] | None,
        parse=_texts,
        panel=_CLIENTS,
    )
    allowed_local_media_path: str | None = option(
        None,
        "Folder whose files clients may name as pictures, by file:///PATH. Default: none.",
        panel=_CLIENTS,
    )
    image_fetch_timeout: float = option(
        5.0,
        "Seconds in which a picture of another host must have come, with all redirects.",
        panel=ADVANCED,
    )
    unguarded_metrics: bool = option(False, "Serve /metrics without a key.", panel=_CLIENTS)
    max_num_reqs_per_key: int | None = option(
        None,
        "Maximum number of requests of one API key at a time; more get 429. Default: no maximum.",
        panel=_CLIENTS,
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Name of the model for clients; may be given several times, and answers have the first. "
        "Default: the model's own.",
        flag_type=list[str] | None,
        parse=_texts,
        panel=_MODEL,
    )
    chat_template: str | None = option(
        None, "Chat template (Jinja), or a file with one. Default: the model's own.", panel=_MODEL
    )
    tool_call_parser: str | None = option(
        None,
        "Format of the model's tool calls: auto, the default (by its chat template or its type), "
        "deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, functiongemma, gemma4, "
        "glm45, glm47, granite, granite4, hermes, kimi_k2, lfm2, llama3_json, llama4_json, "
        "llama4_pythonic, mimo, minimax_m2, mistral, olmo3, openai, phi4_mini_json, pythonic, "
        "qwen3_coder, qwen3_xml, seed_oss.",
        panel=_MODEL,
    )
    reasoning_parser: str | None = option(
        None,
        "Format of the model's reasoning: auto (by its chat template), deepseek_r1, "
        "deepseek_v3, gemma4, glm45, granite, minimax_m2, mistral, openai_gptoss, qwen3, "
        "seed_oss. Default: reasoning is part of the text, except for gpt-oss.",
        panel=_MODEL,
    )
    generation_config: str = option(
        "auto",
        "Source of default sampling parameters: auto (the model's generation_config.json), vllm "
        "(vLLM's own defaults), or a folder with such a file.",
        panel=ADVANCED,
    )
    max_num_queued_reqs: int = option(
        256, "Maximum number of waiting requests; more get 503.", panel=_LIMITS
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Maximum number of prompt tokens of all waiting requests; more get 503. Default: no "
        "maximum.",
        panel=ADVANCED,
    )
    max_request_bytes: int = option(
        16 * 2**20,
        "Maximum size of a request's body in bytes, or e.g. 16MiB.",
        flag_type=str,
        parse=parse_bytes,
        panel=ADVANCED,
    )
    max_logprobs: int = option(
        20, "Maximum number of logprobs per token that a request may ask for.", panel=ADVANCED
    )
    max_stored_response_bytes: int = option(
        64 * 2**20,
        "Memory for stored responses, in bytes or e.g. 64MiB, which clients can retrieve or "
        "continue; 0 stores none.",
        flag_type=str,
        parse=parse_bytes,
        panel=ADVANCED,
    )
    max_background_responses: int = option(
        32,
        "Maximum number of background responses at a time; more get 429.",
        panel=ADVANCED,
    )
    shutdown_timeout: float = option(
        30.0,
        "Seconds that running requests have to finish when the server stops.",
        panel=_LIMITS,
    )
    read_timeout: float = option(
        60.0,
        "Seconds that a client has for a request's header, and for each 64 KiB of its body, before "
        "its connection is closed.",
        panel=ADVANCED,
    )
    body_timeout: float = option(
        300.0, "Seconds that a client has for a request's whole body.", panel=ADVANCED
    )
    timeout_keep_alive: int = option(
        75,
        "Seconds that an idle connection stays open; a proxy in front of the server must close "
        "idle connections earlier.",
        panel=ADVANCED,
    )
    send_timeout: float = option(
        60.0,
        "Seconds that a client has to read each 64 KiB of its answer, before its connection is "
        "closed.",
        panel=ADVANCED,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Address that OpenTelemetry traces are sent to, e.g. http://localhost:4318/v1/traces. "
        "Default: none.",
        panel=_LOGS,
    )
    request_log: str | None = option(
        None,
        "New file for a trace of all requests, which quire simulate reads: times, lengths and hash "
        "ids, no texts. Default: none.",
        panel=_LOGS,
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info",
        "Log level of the HTTP server; info, debug and trace log a line per request.",
        panel=_LOGS,
    )
    disable_log_stats: bool = option(
        False, "Do not log the engine's statistics periodically.", panel=_LOGS
    )

    def __post_init__(self) -> None:
        if not self.host or not self.host.isprintable() or " " in self.host:
            raise ConfigError(f"host={self.host!r} must be a name or an address, e.g. {LOOPBACK}")
        in_range("port", self.port, 0, 65_535)
        for name, least in _AT_LEAST.items():
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), least)
        seconds("shutdown_timeout", self.shutdown_timeout, may_be_zero=True)
        seconds("read_timeout", self.read_timeout, may_be_zero=False)
        seconds("send_timeout", self.send_timeout, may_be_zero=False)
        seconds("image_fetch_timeout", self.image_fetch_timeout, may_be_zero=False)
        seconds("body_timeout", self.body_timeout, may_be_zero=False)
        one_of("uvicorn_log_level", self.uvicorn_log_level, _LOG_LEVELS)
        self._check_keys()
        self._check_names()
        self._check_media()
        self._check_paths()

    @classmethod
    def from_options(cls, **options: Any) -> "ServerConfig":
        """Make a config from keyword arguments and the environment (``QUIRE_PORT=9000``).

        ``VLLM_API_KEY`` counts if no option of Quire sets a key.

        Raises: ConfigError, for an unknown argument with the nearest known name.
        """
        return read(cls, options, _vllms_key)

    @property
    def is_local(self) -> bool:
        """Return whether only programs of this machine can connect."""
        return self.uds is not None or is_loopback(self.host)

    def _check_keys(self) -> None:
        for name in ("api_key", "admin_api_key"):
            keys = getattr(self, name)
            if not _are_texts(keys):
                raise ConfigError(f"{name} must be a tuple of texts")
            for place, key in enumerate(keys, 1):
                if not IS_KEY.fullmatch(key):
                    what = "is empty"
                    if key:
                        what = "has other characters than printable ASCII, or spaces"
                    which = f" {place} of {len(keys)}" if len(keys) > 1 else ""
                    raise ConfigError(f"{name}{which} {what}: no client could send it")

    def _check_names(self) -> None:
        for name in ("served_model_name", "allowed_origins", "allowed_media_domains"):
            if not _are_texts(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a tuple of texts")
        for model in self.served_model_name:
            if not 0 < len(model) <= 256 or not model.isprintable():
                raise ConfigError(
                    f"served_model_name={model!r} must be 1 to 256 printable characters"
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins={origin!r} must be * or an origin without a path, e.g. "
                    "https://chat.example.org"
                )
        if not re.fullmatch(r"(/[!->@-~]+)?", self.root_path) or self.root_path.endswith("/"):
            raise ConfigError(
                f"root_path={self.root_path!r} must begin with / and not end with it, e.g. /llm"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+\S*", endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint={endpoint!r} must be an address, e.g. "
                "http://localhost:4318/v1/traces"
            )

    def _check_media(self) -> None:
        for domain in self.allowed_media_domains:
            if not _DOMAIN.fullmatch(domain):
                raise ConfigError(
                    f"allowed_media_domains={domain!r} must be * or a host without scheme and "
                    "path, e.g. images.example.org"
                )
        folder = self.allowed_local_media_path
        if folder is not None and not (Path(folder).is_absolute() and _is_folder(folder)):
            raise ConfigError(
                f"allowed_local_media_path={folder!r} must be a folder, with its whole path"
            )

    def _check_paths(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(f"ssl_keyfile={self.ssl_keyfile!r} needs ssl_certfile")
        if self.request_log is not None and not Path(self.request_log).absolute().parent.is_dir():
            raise ConfigError(f"request_log={self.request_log!r}: there is no such folder")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}={path!r}: there is no such file")
        if self.chat_template is not None and not _is_template(self.chat_template):
            raise ConfigError(
                f"chat_template={self.chat_template!r} is neither a file nor a template, which has "
                "{{ or {% in it"
            )
        if self.generation_config not in ("auto", "vllm") and not _is_folder(
            self.generation_config
        ):
            raise ConfigError(
                f"generation_config={self.generation_config!r} must be auto, vllm or a folder"
            )
        if not re.fullmatch(r"0?[0-7]{3}", self.uds_mode):
            raise ConfigError(f"uds_mode={self.uds_mode!r} must be three octal digits, e.g. 660")
        if self.uds is None and self.uds_mode != _UDS_MODE:
            raise ConfigError(f"uds_mode={self.uds_mode} needs uds")
        if self.uds is not None:
            if not self.uds or len(self.uds.encode()) > _SOCKET_PATH_BYTES:
                raise ConfigError(f"uds={self.uds!r} must be 1 to {_SOCKET_PATH_BYTES} bytes long")
            if not Path(self.uds).absolute().parent.is_dir():
                raise ConfigError(f"uds={self.uds!r}: there is no such folder")


def _vllms_key(given: set[str]) -> dict[str, EnvironmentValue]:
    """Read ``VLLM_API_KEY``.

    Raises: ConfigError for a variable that is set and empty, since the operator wants a key and the
    server would have none.
    """
    for variable, name in (
        ("QUIRE_API_KEY", "api_key"),
        ("VLLM_API_KEY", "api_key"),
        ("QUIRE_ADMIN_API_KEY", "admin_api_key"),
    ):
        if name not in given and is_empty(variable):
            raise ConfigError(
                f"environment variable {variable}: {name} is empty; unset it for a server without "
                "keys"
            )
    own = None if "api_key" in given else said("VLLM_API_KEY", parse_keys)
    return {} if own is None else {"api_key": own}


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, str) for part in value)


def _is_template(text: str) -> bool:
    if "{{" in text or "{%" in text:
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _is_folder(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):
        return False
