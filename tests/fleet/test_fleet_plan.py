"""What a fleet is made of, and the file that says it: without Ray."""

import json
import re
import sys
from contextlib import suppress

import pytest
import yaml

from quire.cli import main
from quire.config import EngineConfig, FleetConfig, ServerConfig
from quire.errors import ConfigError
from quire.fleet.fleet_plan import BUSY, BUSY_GOAL, QUEUED_S, FleetPlan, wanted_replicas

TRANSFER = json.dumps(
    {
        "kv_connector": "QuireConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"listen": "unix:/run/quire/own"},
    }
)


def test_a_plan_has_what_is_not_the_default_and_can_be_written_as_json() -> None:
    engine = EngineConfig(
        max_num_seqs=8, speculative_config={"method": "ngram", "num_speculative_tokens": 3}
    )
    server = ServerConfig(shutdown_timeout=7.0, served_model_name=("a", "b"))
    plan = FleetPlan.of("a/b", engine, server, FleetConfig(replicas=3))
    said = json.loads(json.dumps({"engine": plan.engine, "server": plan.server}))
    assert set(said["engine"]) == {"max_num_seqs", "speculative_config"}
    assert set(said["server"]) == {"shutdown_timeout", "served_model_name"}
    again = FleetPlan.from_args({"model": "a/b", "fleet": {"replicas": 3}, **said})
    assert again.engine_config() == engine
    assert again.server_config() == server
    assert again.fleet == plan.fleet


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"modle": "x"}, "args: 'modle' is unknown; known: model, engine, server, fleet"),
        ({"engine": ["x"]}, "args: engine must be a mapping of options"),
        ({"model": 5}, "args: model=5 must be a text"),
        ({"engine": {"max_num_seq": 5}}, "unknown option 'max_num_seq'; did you mean"),
        ({"fleet": {"replica": 5}}, "unknown option 'replica'; did you mean 'replicas'?"),
        ({"fleet": {"replicas": 0}}, "replicas=0 must be from 1 to 1,024"),
        (
            {"fleet": {"max_replicas": 1}},
            "replicas=2 must be from min_replicas=2 to max_replicas=1",
        ),
        ({"fleet": {"cpus_per_replica": 1.5}}, "cpus_per_replica=1.5 must be a whole number"),
        ({"fleet": {"gpus_per_replica": -1.0}}, "gpus_per_replica=-1 must be from 0"),
        ({"fleet": {"placement": "best"}}, "placement 'best' is unknown; known: exact"),
        (
            {"engine": {"tensor_parallel_size": 2}, "fleet": {"gpus_per_replica": 1.0}},
            "gpus_per_replica=1 is less than tensor_parallel_size=2",
        ),
        (
            {"engine": {"kv_events_config": '{"enable_kv_cache_events": true}'}},
            "kv_events_config: the fleet publishes events of its own",
        ),
        (
            {
                "engine": {"kv_transfer_config": TRANSFER},
                "fleet": {"prefill_replicas": 1},
            },
            "kv_transfer_config: with prefill_replicas=1 the fleet says by itself",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(args: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        FleetPlan.from_args(args)


def test_serve_cuts_nothing_that_ends_in_time() -> None:
    for timeout_s in (0.0, 30.0, 600.0):
        plan = FleetPlan(server={"shutdown_timeout": timeout_s})
        assert plan.graceful_shutdown_s > timeout_s + 10


# -- the command -----------------------------------------------------------------------------------


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["quire", "fleet", *line.split(), "--print-config"])
    with suppress(SystemExit):
        main()
    out, err = capsys.readouterr()
    return out, " ".join(err.split())


def test_the_file_has_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "5")  # of this machine alone
    line = (
        "org/model --replicas 4 --gpus-per-replica 1 --kv-cache-memory-bytes 2GiB --port 9000 "
        "--api-key @/keys/all.txt --served-model-name a --served-model-name b"
    )
    out, _ = printed(monkeypatch, capsys, line)
    config = yaml.safe_load(out)
    assert config["http_options"] == {"host": "0.0.0.0", "port": 9000}
    (application,) = config["applications"]
    assert application["import_path"] == "quire.fleet.ray_serve:build"
    assert application["args"] == {
        "model": "org/model",
        "fleet": {"replicas": 4, "gpus_per_replica": 1.0},
        "engine": {"kv_cache_memory_bytes": "2GiB"},
        "server": {"api_key": ["@/keys/all.txt"], "served_model_name": ["a", "b"]},
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--api-key secret-word", "error: api_key: a key would stand in the file for all to read"),
        ("--uds /run/quire.sock", "error: uds='/run/quire.sock': on a cluster"),
        (
            "--num-gpu-blocks-override 5",
            "error: num_gpu_blocks_override is an option of quire serve",
        ),
        ("--prefill-replicas 1", "error: prefill_replicas=1: blocks go over Unix sockets of one"),
        ("--prefill-replicas -1", "error: prefill_replicas=-1 must be from 0"),
        ("--max-num-seqs 0", "error: max_num_seqs=0 must be from 1"),
        ("--shutdown-timeout -1", "error: shutdown_timeout=-1.0 must be at least 0"),
    ],
)
def test_what_a_file_cannot_say_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    out, err = printed(monkeypatch, capsys, line)
    assert not out
    assert err.startswith(says)
    assert "secret-word" not in err


# -- how many --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "queued_s", "wanted"),
    [
        ([], [], 1),
        ([0.0, 0.0], [0.0, 0.0], 1),
        ([BUSY_GOAL, BUSY_GOAL], [0.1, 0.1], 2),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], 4),
        ([0.1, 0.1], [2.5, 0.0], 3),  # few sequences, and long prompts
        ([3.2], [0.5], 4),
    ],
)
def test_as_many_replicas_as_would_be_busy(
    busy: list[float], queued_s: list[float], wanted: int
) -> None:
    assert wanted_replicas({BUSY: busy, QUEUED_S: queued_s}) == wanted
