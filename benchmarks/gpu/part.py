"""What runs in a part's process: its tests or its measurement, told to ``run`` as it goes.

``run`` writes what it asks for as JSON to the standard input.
"""

import faulthandler
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any

from benchmarks.gpu.parts import ENVIRONMENT, PARTS

IN_MODULE = {"decode": "attention", "prefill": "attention"}  # others: in one of their own name


def main() -> int:
    """Run the part that standard input names."""
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)  # before a process is ended that hangs
    asked = json.load(sys.stdin)
    name = asked["part"]
    if name == ENVIRONMENT:
        from benchmarks.gpu.environment import look

        look(asked["emulated"])
    elif PARTS[name].is_check:
        from benchmarks.gpu.check import check

        return check(asked)
    else:
        measure(name, asked)
    return 0


def measure(name: str, asked: dict[str, Any]) -> None:
    """Run a part that measures."""
    import torch

    from benchmarks.gpu.setting import Setting

    torch.manual_seed(asked["seed"])
    setting = Setting(emulated=asked["emulated"], seed=asked["seed"], rounds=asked["rounds"])
    getattr(import_module(f"benchmarks.gpu.{IN_MODULE.get(name, name)}"), name)(setting)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a device that is lost, or a thread that hangs, keeps no process from ending
