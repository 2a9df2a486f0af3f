"""``--kv-transfer-config``: vLLM's JSON, and what of it is refused with a reason."""

import json
from typing import Any

import pytest

from quire.config import EngineConfig, KVTransferConfig
from quire.engine.kv_sizing import staging_bytes, tier_bytes
from quire.errors import ConfigError

OWN: dict[str, Any] = {"kv_connector": "QuireConnector", "kv_role": "kv_both"}
VLLMS: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def own(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {**OWN, "kv_role": role, "kv_connector_extra_config": extra}


def test_what_vllm_calls_offloading_is_tiers() -> None:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 2**30,
        "secondary_tiers": [{"type": "fs", "root_dir": "/var/cache/with space"}],
    }
    given = {**VLLMS, "kv_connector_extra_config": extra}
    config = EngineConfig.from_options(kv_transfer_config=json.dumps(given))
    assert [str(each) for each in config.tiers] == ["memory:", "file:/var/cache/with%20space"]
    assert tier_bytes(config, [], 4096) == 2**30 + staging_bytes([], 16, 512)
    assert not config.kv_transfer_config.is_own
    with pytest.raises(ConfigError, match="kv_offloading_size"):
        EngineConfig(kv_transfer_config=given, kv_offloading_size=2**30)


def test_memory_for_leases_is_counted() -> None:
    config = EngineConfig(kv_transfer_config=own(listen="unix:/run/peer", size="2GiB"))
    assert tier_bytes(config, [], 4096) == 2**31 + staging_bytes([], 16, 512)
    config = EngineConfig(kv_transfer_config=own("kv_consumer", peers=["unix:/run/peer"]))
    assert tier_bytes(config, [], 4096) == staging_bytes([], 16, 512)


def test_roles() -> None:
    both = KVTransferConfig(**own(listen="unix:/a", peers=["unix:/b", "tcp://[::1]:5"]))
    assert both.gives
    assert both.takes
    assert [str(each) for each in both.addresses] == ["unix:/a", "tcp://[::1]:5", "unix:/b"]
    producer = KVTransferConfig(**{**OWN, "kv_role": "kv_producer", "kv_port": 7})
    assert (str(producer.listen), producer.takes) == ("tcp://127.0.0.1:7", False)
    consumer = KVTransferConfig(**own("kv_consumer", peers=["unix:/b"]))
    assert (consumer.listen, consumer.gives) == (None, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[", "is not JSON"),
        ({**OWN, "kv_conector": 1}, "did you mean 'kv_connector'"),
        ({"kv_role": "kv_both"}, "kv_connector is missing; known: QuireConnector"),
        ({"kv_connector": "QuireConnector"}, "kv_role is missing; known: kv_producer"),
        ({**OWN, "kv_connector": "NixlConnector"}, "use QuireConnector"),
        ({**OWN, "kv_connector": "LMCacheConnectorV1"}, "use kv_tier"),
        ({**OWN, "kv_connector": "LMCacheMPConnector"}, "use kv_tier"),
        ({**OWN, "kv_connector": "MooncakeConnector"}, "kv_tier=mooncake"),
        ({**OWN, "kv_connector": "MineConnector"}, "known: QuireConnector, OffloadingConnector"),
        ({**OWN, "kv_load_failure_policy": "fail"}, "use 'recompute'"),
        ({**OWN, "kv_connector_module_path": "a.b"}, "no code from outside"),
        ({**OWN, "enable_permute_local_kv": True}, "enable_permute_local_kv"),
        ({**OWN, "kv_port": 70_000}, "kv_port"),
        ({**OWN, "kv_connector_extra_config": []}, "must be a JSON object"),
        (own(pears=[]), "did you mean 'peers'"),
        (own(peers=["http://a"]), "no address of a peer"),
        (own(peers="unix:/a"), "must be a list"),
        (own(listen="here"), "listen: 'here' is no address"),
        (own(lease_s=0), "lease_s=0 must be above 0"),
        (own(lease_s=True), "lease_s"),
        (own(lease_s=10**400), "lease_s=1000"),  # more than a float holds
        (own(wait_s=-1), "wait_s=-1 must be from 0 to 3600 seconds"),
        (own(wait_s=float("nan")), "wait_s=nan"),
        (own(wait_s="9"), "wait_s='9'"),
        (own(size=0), "size"),
        (own(size="much"), "size: 'much' is not a size"),
        (own(drain_to="unix:/c", peers=["unix:/b"]), "must be one of peers"),
        (own("kv_consumer"), "needs peers"),
        (own(listen="tcp://0.0.0.0:5"), "set kv_ip"),
        ({**VLLMS}, "cpu_bytes_to_use is missing"),
        ({**VLLMS, "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "x": 2}}, "x=2 has no"),
        (
            {
                **VLLMS,
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 1,
                    "secondary_tiers": [{"type": "s3", "bucket": "b"}],
                },
            },
            "is refused",
        ),
        (
            {
                **VLLMS,
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 1,
                    "secondary_tiers": [{"type": "fs", "root_dir": "/a\ud800"}],
                },
            },
            "is refused",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        EngineConfig(kv_transfer_config=given)
    assert str(caught.value).startswith("kv_transfer_config")


def test_tcp_needs_a_key_or_trust() -> None:
    for address in (own(listen="tcp://127.0.0.1:5"), own("kv_consumer", peers=["tcp://b:5"])):
        with pytest.raises(ConfigError, match="set kv_tier_key"):
            EngineConfig(kv_transfer_config=address)
        EngineConfig(kv_transfer_config=address, kv_tier_trusted=True)
        EngineConfig(kv_transfer_config=address, kv_tier_key="/etc/key")
    with pytest.raises(ConfigError, match="kv_tier_key"):
        EngineConfig(kv_tier_key="/etc/key")
