"""Options of the server: checked when they are given, and keys shown nowhere."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError

KEY = "sk-a-secret-key"


def test_defaults_are_for_this_machine_alone() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.is_local) == ("127.0.0.1", 8000, True)
    assert all(option.metadata["help"].endswith(".") for option in fields(ServerConfig))
    both = {option.name for option in fields(EngineConfig)} & {f.name for f in fields(config)}
    assert not both, "a flag can mean one thing"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": ""}, "host='' must be a name or an address"),
        ({"host": "a b"}, "host='a b' must be a name or an address"),
        ({"port": -1}, "port=-1 must be from 0 to 65,535"),
        ({"port": "80"}, "port='80' must be a whole number"),
        ({"uds": "/no/such/folder/s"}, "uds='/no/such/folder/s': there is no such folder"),
        ({"uds": "x" * 200}, "must be 1 to 107 bytes long"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile='key.pem' needs ssl_certfile"),
        ({"ssl_certfile": "/no/file"}, "ssl_certfile='/no/file': there is no such file"),
        ({"root_path": "llm"}, "root_path='llm' must begin with /"),
        ({"root_path": "/llm/"}, "root_path='/llm/' must begin with / and not end with it"),
        ({"allowed_origins": ("example.org",)}, "allowed_origins='example.org' must be * or"),
        ({"allowed_origins": ("http://a/b",)}, "must be * or an origin without a path"),
        ({"allowed_media_domains": ("https://a.example",)}, "must be * or a host without scheme"),
        ({"allowed_local_media_path": "/no/folder"}, "must be a folder, with its whole path"),
        ({"allowed_local_media_path": "."}, "allowed_local_media_path='.' must be a folder"),
        ({"image_fetch_timeout": 0}, "image_fetch_timeout=0 must be above 0"),
        ({"served_model_name": ("",)}, "served_model_name='' must be 1 to 256 printable"),
        ({"served_model_name": ("a\nb",)}, "must be 1 to 256 printable characters"),
        ({"chat_template": "/no/file"}, "chat_template='/no/file' is neither a file nor a"),
        ({"generation_config": "atuo"}, "generation_config='atuo' must be auto, vllm or a"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs=0 must be from 1"),
        ({"max_request_bytes": 5}, "max_request_bytes=5 must be from 1,024"),
        ({"max_logprobs": -1}, "max_logprobs=-1 must be from 0"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout=inf must be a number of seconds"),
        ({"shutdown_timeout": -1}, "shutdown_timeout=-1 must be at least 0"),
        ({"send_timeout": 0}, "send_timeout=0 must be above 0"),
        ({"otlp_traces_endpoint": "localhost"}, "otlp_traces_endpoint='localhost' must be an"),
        ({"request_log": "/no/such/folder/x"}, "request_log='/no/such/folder/x': there is no such"),
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level 'loud' is unknown; known: critical"),
        ({"prot": 1}, "unknown option 'prot'; did you mean 'port'?"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_options(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize("keys", [(KEY, ""), (f"{KEY} x",), (KEY, f"{KEY}é"), (f"{KEY}\n",), KEY])
def test_a_wrong_key_is_refused_and_not_shown(keys: Any) -> None:
    for name in ("api_key", "admin_api_key"):
        with pytest.raises(ConfigError, match=rf"^{name}") as caught:
            ServerConfig(**{name: keys})
        assert KEY not in str(caught.value)
        assert KEY not in repr(ServerConfig(**{name: (KEY,)}))


def test_keys_may_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n{KEY}\n\n  other  \n")
    config = ServerConfig.from_options(api_key=[f"@{path}", "third"])
    assert config.api_key == (KEY, "other", "third")
    monkeypatch.setenv("QUIRE_API_KEY", f"@{path}")
    assert ServerConfig.from_options().api_key == (KEY, "other")
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match=r"QUIRE_API_KEY: api_key: @.*has no key"):
        ServerConfig.from_options()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ServerConfig.from_options(api_key=f"@{tmp_path}/nothing")
    with pytest.raises(ConfigError, match=r"^admin_api_key: @.* cannot be read"):
        ServerConfig.from_options(admin_api_key=f"@{tmp_path}/nothing")
    path.write_text(f"{KEY}\n")
    monkeypatch.setenv("QUIRE_API_KEY", "one")
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", f"@{path}")
    assert ServerConfig.from_options().admin_api_key == (KEY,)


def test_vllms_variable_for_a_key_counts_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "vllms")
    assert ServerConfig.from_options().api_key == ("vllms",)
    assert ServerConfig.from_options(api_key=["mine"]).api_key == ("mine",)
    monkeypatch.setenv("QUIRE_API_KEY", "quires")
    assert ServerConfig.from_options().api_key == ("quires",)


@pytest.mark.parametrize("variable", ["QUIRE_API_KEY", "VLLM_API_KEY", "QUIRE_ADMIN_API_KEY"])
def test_an_empty_key_does_not_open_the_server(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "")
    name = "admin_api_key" if "ADMIN" in variable else "api_key"
    with pytest.raises(ConfigError, match=f"environment variable {variable}: {name} is empty"):
        ServerConfig.from_options()
    assert getattr(ServerConfig.from_options(**{name: ["mine"]}), name) == ("mine",)


def test_the_environment_says_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "QUIRE_PORT": "9000",
        "QUIRE_SERVED_MODEL_NAME": "big, small",
        "QUIRE_ALLOWED_ORIGINS": '["https://a.example", "http://b.example:81"]',
        "QUIRE_MAX_REQUEST_BYTES": "1MiB",
        "QUIRE_SHUTDOWN_TIMEOUT": "0",
        "QUIRE_UNGUARDED_METRICS": "on",
    }
    for name, text in said.items():
        monkeypatch.setenv(name, text)
    assert ServerConfig.from_options() == ServerConfig(
        port=9000,
        served_model_name=("big", "small"),
        allowed_origins=("https://a.example", "http://b.example:81"),
        max_request_bytes=2**20,
        shutdown_timeout=0.0,
        unguarded_metrics=True,
    )
    monkeypatch.setenv("QUIRE_ALLOWED_ORIGINS", "[1]")
    with pytest.raises(ConfigError, match="QUIRE_ALLOWED_ORIGINS: '\\[1\\]' must be a list"):
        ServerConfig.from_options()


def test_what_kubernetes_says_of_a_service_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PORT", "tcp://10.0.0.7:80")
    assert ServerConfig.from_options().port == 8000


@pytest.mark.parametrize(
    ("options", "is_local"),
    [
        ({"host": "127.0.0.2"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "some.name"}, False),
        ({"host": "0.0.0.0", "uds": "s"}, True),
    ],
)
def test_it_knows_who_can_reach_it(options: dict[str, Any], is_local: bool) -> None:
    assert ServerConfig(**options).is_local is is_local


def test_options_that_need_each_other_may_come_from_different_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_SWAP_PATH", "/tmp")
    assert EngineConfig.from_options(swap_space="1GiB").swap_path == "/tmp"
    with pytest.raises(ConfigError, match="environment variable QUIRE_SWAP_PATH: swap_path='/tmp'"):
        EngineConfig.from_options()
