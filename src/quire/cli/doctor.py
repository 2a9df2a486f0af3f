"""Run ``quire doctor``: show this machine's memory and the KV budget that each rule gives in it.

No weights are loaded; shapes come from config.json. For tiers the weights are hashed.
"""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from quire.cli.diagnosis import Diagnosis, diagnose
from quire.cli.options import AsJson, Model, with_engine_options
from quire.cli.report import print_report
from quire.cli.tier_folders import as_json as tiers_as_json
from quire.cli.tier_folders import find_tiers, print_tiers
from quire.config import EngineConfig
from quire.memory.budget import Ledger


@with_engine_options
def doctor(
    *,
    model: Model = None,
    as_json: AsJson = False,
    engine: dict[str, Any],
) -> None:
    """Show this machine's memory, how much of it the KV cache may take, and why.

    With --kv-tier it says what the tier's folder holds, and whether an engine would read it.

    \b
    quire doctor
    quire doctor --model Qwen/Qwen3-4B --max-model-len 8192 --budget vllm
    quire doctor --kv-tier file:/var/cache/quire
    """
    config = EngineConfig.from_options(**engine)
    console = Console(stderr=True)
    with console.status("reading the model's shapes …"):
        found = diagnose(model, config)
    tiers = find_tiers(model, config)
    if as_json:
        print(json.dumps({**_as_dict(found), "kv_tiers": tiers_as_json(tiers)}))
    else:
        print_report(found)
        print_tiers(tiers, Console(highlight=False))


def _as_dict(found: Diagnosis) -> dict[str, Any]:
    def described(ledger: Ledger) -> dict[str, Any]:
        return {
            **asdict(ledger),
            "kv_bytes": ledger.kv_bytes,
            "kv_tokens": found.num_tokens(ledger),
            "sequences": round(found.num_sequences(ledger), 2),
            "flag": ledger.remedy and ledger.remedy.flag,
        }

    return {
        "model": found.name,
        "needs": asdict(found.needs),
        "machine": asdict(found.machine),
        "accelerators": [
            {
                "memory": each.memory and asdict(each.memory),
                "why_not": each.why_not,
                "rules": {ledger.rule: described(ledger) for ledger in each.rules},
            }
            for each in found.accelerators
        ],
        "ledger": described(found.ledger),
        "rules": {ledger.rule: described(ledger) for ledger in found.rules},
        "mechanisms": {what: why_not or "yes" for what, why_not in found.mechanisms},
    }
