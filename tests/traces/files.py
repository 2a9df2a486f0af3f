"""A few lines of each form that traces are published in, written by hand."""

import json
from pathlib import Path
from typing import Any

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
BURSTGPT_3 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,a-1,43,GPT-4,906,446,1352,Conversation log
19440161.5,,2,ChatGPT,36,29,65,API log
"""
MOONCAKE = (
    {"timestamp": 3000, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3500, "input_length": 1300, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 6000, "input_length": 700, "output_length": 8, "hash_ids": [4, 5]},
)
# Not a trace yet: what an OpenAI server counts, without times.
COUNTED = tuple({"prompt_tokens": 100 + i, "completion_tokens": 5} for i in range(8))
BAILIAN = (
    {"chat_id": 55, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 20, "type": "text"},
    {"chat_id": 9, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 16, "type": "file"},
    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 70.0, "input_length": 40, "type": "text"},
    {"chat_id": 4, "parent_chat_id": 159, "timestamp": 71.5, "input_length": 64, "type": "text"},
)
CONVERSATION: dict[str, Any] = {
    "id": "trace_0001",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 1.0, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2], "think_time": 0.0},
        {
            "t": 2.0,
            "type": "subagent",
            "agent_id": "agent_001",
            "requests": [
                {"t": 0.0, "type": "n", "in": 64, "out": 3, "hash_ids": [7]},
                {"t": 2.5, "type": "n", "in": 128, "out": 3, "hash_ids": [7, 8]},
            ],
        },
        {"t": 4.0, "type": "s", "in": 200, "out": 0, "hash_ids": [1, 2, 3], "think_time": 1.5},
    ],
}


def rows(several: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in several)


def bailian() -> str:
    first = 0
    found = []
    for row in BAILIAN:
        count = -(-int(row["input_length"]) // 16)  # type: ignore[call-overload]
        found.append({**row, "output_length": 3, "turn": 1, "hash_ids": [*range(first, count)]})
    return rows(found)


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def servegen(folder: Path) -> Path:
    """Two clients: one with a quiet window in the middle, one that begins late."""
    written(
        folder,
        "chunk-0-trace.csv",
        "0,2.0,1.5,Gamma,0.44,1.1\n600,0,0,,0,0\n1200,1.0,2,Weibull,0.5,0.5\n",
    )
    written(folder, "chunk-3-trace.csv", "0,0,0,,0,0\n600,0.5,1,Gamma,1,2\n1200,0,0,,0,0\n")
    lengths = {"input_tokens": "{17: 0.25, 80: 0.75}", "output_tokens": "{5: 1.0}"}
    later = {"input_tokens": "{300: 1.0}", "output_tokens": "{1: 0.5, 2: 0.5}"}
    written(folder, "chunk-0-dataset.json", json.dumps({"0": lengths, "1200": later}))
    written(
        folder,
        "chunk-3-dataset.json",
        json.dumps({"0": lengths, "600": {"input_tokens": "{}", "output_tokens": "{}"}}),
    )
    return folder
