"""Options of events: vLLM's names, and addresses of this machine unless another is said."""

from typing import Any

import pytest

from quire.config import EngineConfig, KVEventsConfig
from quire.errors import ConfigError

ON = {"enable_kv_cache_events": True}


def test_events_are_off_until_they_are_asked_for() -> None:
    assert EngineConfig().kv_events_config is None
    assert not KVEventsConfig().publishes
    assert not KVEventsConfig(publisher="zmq").publishes
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").publishes
    config = EngineConfig.from_options(kv_events_config='{"enable_kv_cache_events": true}')
    assert config.kv_events_config == KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    assert config.kv_events_config.publishes


def test_fields_and_defaults_are_vllms_but_for_the_address() -> None:
    """vllm/config/kv_events.py of 0.33.0."""
    config = KVEventsConfig(**ON)
    assert {name: getattr(config, name) for name in config.__slots__} == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:5557",
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
        "name_key": None,  # our own
    }


@pytest.mark.parametrize(
    ("endpoint", "binds", "is_open"),
    [
        ("tcp://127.0.0.1:5557", True, False),
        ("tcp://localhost:5557", True, False),
        ("tcp://[::1]:5557", True, False),
        ("ipc:///run/quire/events", True, False),
        ("tcp://*:5557", True, True),
        ("tcp://0.0.0.0:5557", True, True),
        ("tcp://[::]:5557", True, True),
        ("tcp://router.example:5557", False, True),
        ("tcp://10.0.0.7:5557", False, True),
    ],
)
def test_an_endpoint_is_bound_here_or_connected_to(
    endpoint: str, binds: bool, is_open: bool
) -> None:
    config = KVEventsConfig(**ON, endpoint=endpoint)
    assert config.binds == binds
    assert config.open_endpoints == ((endpoint,) if is_open else ())
    both = KVEventsConfig(**ON, replay_endpoint="tcp://*:5558")
    assert both.open_endpoints == ("tcp://*:5558",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("x", "kv_events_config 'x' is not JSON"),
        (7, "kv_events_config=7 must be a JSON object"),
        (
            {"enabled": True},
            "kv_events_config: unknown 'enabled'; known: buffer_steps, enable_kv_cache_events, "
            "endpoint, hwm, max_queue_size, name_key, publisher, replay_endpoint, topic",
        ),
        ({"endpont": "x"}, "kv_events_config: unknown 'endpont'; did you mean 'endpoint'?"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1 must be true or false"),
        ({"publisher": "nats"}, "kv_events_config: publisher 'nats' is unknown; known: zmq, null"),
        ({"hwm": 0}, "kv_events_config: hwm=0 must be from 1 to 16,777,216"),
        ({"max_queue_size": "9"}, "max_queue_size='9' must be a whole number"),
        ({"buffer_steps": -1}, "buffer_steps=-1 must be from 0 to"),
        ({"topic": 7}, "topic=7 must be a text of up to 1024 bytes"),
        ({"topic": "ß" * 600}, "must be a text of up to 1024 bytes"),
        ({"topic": "\ud800"}, "must be a text of up to 1024 bytes"),
        ({"endpoint": "127.0.0.1:5557"}, "endpoint='127.0.0.1:5557' must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://*"}, "endpoint='tcp://*' must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:70000"}, "with a port up to 65,535"),
        ({"endpoint": "inproc://here"}, "or ipc://PATH of up to 107 bytes"),
        ({"endpoint": f"ipc:///{'x' * 200}"}, "or ipc://PATH of up to 107 bytes"),
        ({"replay_endpoint": "nowhere"}, "replay_endpoint='nowhere' must be tcp://HOST:PORT"),
        (
            {"replay_endpoint": "tcp://127.0.0.1:5557"},
            "replay_endpoint='tcp://127.0.0.1:5557' is the endpoint of the stream",
        ),
    ],
)
def test_a_wrong_field_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(kv_events_config=given)
    assert said in str(caught.value)


def test_events_need_a_cache_that_keeps_blocks() -> None:
    with pytest.raises(ConfigError, match="enable_kv_cache_events needs enable_prefix_caching"):
        EngineConfig(kv_events_config=ON, enable_prefix_caching=False)
    EngineConfig(
        kv_events_config={**ON, "publisher": "null"}, enable_prefix_caching=False
    )  # nothing is announced
