"""The fleet that ``quire fleet --print-config`` describes, behind Serve's own proxy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleet_ray.fleet_process import COMMAND
from ports import held_port

pytestmark = pytest.mark.ray

# In a process of its own, whose logging and signals Ray may change.
SERVED = """
import sys
import time
from importlib import import_module

import httpx
import psutil
import yaml

from quire.config import prepare_own_ray

prepare_own_ray()
import ray
from ray import serve

config = yaml.safe_load(open(sys.argv[1]))
ray.init(
    address="local",
    num_cpus=8,
    include_dashboard=False,
    log_to_driver=False,
    _node_ip_address="127.0.0.2",
)
try:
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    build = getattr(import_module(module), name)
    serve.run(
        build(application["args"]),
        name=application["name"],
        route_prefix=application["route_prefix"],
    )
    http = config["http_options"]
    url = f"http://{http['host']}:{http['port']}/v1/completions"
    body = {"model": "demo", "prompt": "def f(x):", "max_tokens": 8, "temperature": 0}
    whole = httpx.post(url, json=body, timeout=60, trust_env=False)
    print(whole.status_code, whole.json()["usage"]["completion_tokens"])
    streamed = httpx.post(url, json={**body, "stream": True}, timeout=60, trust_env=False)
    print(streamed.status_code, streamed.text.strip().splitlines()[-1])
    started = psutil.Process().children(recursive=True)
    (door,) = (each for each in started if "ServeReplica:quire:Door" in " ".join(each.cmdline()))
    door.kill()  # Serve puts another one in its place, which finds the replica
    door.wait(10)
    end_s = time.monotonic() + 90
    while time.monotonic() < end_s:
        again = httpx.post(url, json=body, timeout=90, trust_env=False)  # the proxy waits for it
        if again.status_code == 200:
            break
        time.sleep(0.5)
    print(again.status_code, again.json()["choices"] == whole.json()["choices"])
finally:
    serve.shutdown()
    ray.shutdown()
"""


def test_the_printed_file_is_served(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    with held_port() as port:  # Serve's proxy sets SO_REUSEADDR
        with file.open("wb") as writes:
            subprocess.run(
                [
                    *(sys.executable, "-c", COMMAND, "fleet", "--print-config", "--replicas", "1"),
                    *("--kv-cache-memory-bytes", "64MiB", "--shutdown-timeout", "2"),
                    *("--host", "127.0.0.1", "--port", str(port)),
                ],
                stdout=writes,
                check=True,
            )
        done = subprocess.run(
            [sys.executable, "-c", SERVED, str(file)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    # Beside what Ray says of the door that has died, and of its own end.
    said = [line for line in done.stdout.splitlines() if line.startswith("200 ")]
    assert said == ["200 8", "200 data: [DONE]", "200 True"], done.stderr
