"""Part of the GPU's benchmark: a Qwen3-4B-shaped random model, 64 requests at once, by Quire and by
Transformers' continuous batching, each in a process of its own, in turns.

Both have the same weights (a seed), the same prompts, and as many tokens to give; nothing is
sampled and nothing shared. Tokens a second are those of answers.
"""

import inspect
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_setting import Found, Setting
from harness.report import Table

NUM_REQUESTS = 64
ROUNDS = 3
PATIENCE_S = 300.0  # for a worker to start, or to finish a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What both are asked."""

    prompts: list[list[int]]
    answer_tokens: int
    max_model_len: int
    seed: int
    emulated: bool


def engine(setting: Setting) -> Found:
    """Throughput and time a token at 64 requests."""
    load = _load(setting)
    found = Found()
    context = get_context("spawn")
    workers: dict[str, tuple[Any, Connection]] = {}
    said: dict[str, str] = {}
    for name, serve in (("quire", _quire), ("transformers", _transformers)):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(serve, load, theirs), daemon=True)
        process.start()
        workers[name] = (process, ours)
        said[name] = str(_answer(process, ours))
    seconds: dict[str, list[float]] = {}
    for number in range(1 + (1 if setting.emulated else ROUNDS)):  # the first one warms up
        for name, (process, connection) in workers.items():
            if said[name].startswith("failed"):
                continue
            connection.send("go")
            took = _answer(process, connection)
            if not isinstance(took, float):
                said[name] = str(took)
            elif number:
                seconds.setdefault(name, []).append(took)
    for process, connection in workers.values():
        if process.is_alive():
            connection.send("end")
            process.join(10)
            process.kill()
    tokens = NUM_REQUESTS * load.answer_tokens
    rates = {name: [tokens / each for each in took] for name, took in seconds.items()}
    rows = [
        [
            name,
            *(f"{value:,.0f}" for value in (statistics.median(each), min(each), max(each))),
            said[name],
        ]
        for name, each in rates.items()
    ]
    found.notes += [f"{name}: {text}" for name, text in said.items() if name not in rates]
    mean = sum(map(len, load.prompts)) / NUM_REQUESTS
    title = f"{NUM_REQUESTS} requests of {mean:.0f} tokens, {load.answer_tokens} to each answer"
    columns = ("engine", "tokens/s", "least", "most", "how")
    found.tables.append(Table(title=title, columns=columns, rows=rows))
    ours = statistics.median(rates["quire"]) if "quire" in rates else 0.0
    peer = statistics.median(rates["transformers"]) if "transformers" in rates else None
    ratio = None
    if ours and peer:
        pairs = zip(rates["quire"], rates["transformers"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
    found.claim(
        f"throughput at {NUM_REQUESTS} requests beside Transformers' continuous batching",
        ours,
        peer,
        "tokens/s",
        ">= 1.0",
        ratio is not None and ratio >= 1,
        ratio,
        timed=True,
    )
    return found


def _load(setting: Setting) -> Load:
    generator = torch.Generator().manual_seed(setting.seed)
    lengths = (4, 12) if setting.emulated else (128, 896)
    prompts = [
        torch.randint(3, 190, (int(length),), generator=generator).tolist()
        for length in torch.randint(*lengths, (NUM_REQUESTS,), generator=generator)
    ]
    answer = 4 if setting.emulated else 128
    return Load(
        prompts=prompts,
        answer_tokens=answer,
        max_model_len=lengths[1] + answer,
        seed=setting.seed,
        emulated=setting.emulated,
    )


def _answer(process: Any, connection: Connection) -> Any:
    """What a worker says next; "failed …" if it says nothing."""
    begun = time.monotonic()
    while not connection.poll(0.5):
        if not process.is_alive():
            return f"failed: its process ended with {process.exitcode}"
        if time.monotonic() - begun > PATIENCE_S:
            process.kill()
            return f"failed: it said nothing for {PATIENCE_S:.0f} s"
    try:
        return connection.recv()
    except EOFError:
        return "failed: its process ended"


def _serve(
    make: Callable[[Load], tuple[str, Callable[[], None]]], load: Load, connection: Connection
) -> None:
    """In a worker: say what it is, then run a round whenever it is told to."""
    try:
        told, run = make(load)
        connection.send(told)
        while connection.recv() == "go":
            begun = time.perf_counter()
            run()
            connection.send(time.perf_counter() - begun)
    except Exception as error:  # whatever it is, the other one is measured all the same
        traceback.print_exc()
        connection.send(f"failed: {' '.join(repr(error).split())[:300]}")


def _model(load: Load, **given: Any) -> Any:
    """Qwen3-4B's shape, random weights in bfloat16, on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = dict(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    if load.emulated:
        shape = dict(
            vocab_size=199,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    config = Qwen3Config(**shape, max_position_embeddings=40_960, tie_word_embeddings=True)
    torch.manual_seed(load.seed)
    with torch.device("cpu" if load.emulated else "cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **given).eval()


def _quire(load: Load) -> tuple[str, Callable[[], None]]:
    from quire import LLM, SamplingParams

    room = load.max_model_len * NUM_REQUESTS * (512 if load.emulated else 147_456) * 2
    llm = LLM(
        _model(load),
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=256 if load.emulated else 8192,
        max_model_len=load.max_model_len,
        kv_cache_memory_bytes=room,
        enable_prefix_caching=False,
    )
    params = SamplingParams(max_tokens=load.answer_tokens, temperature=0, ignore_eos=True)

    def run() -> None:
        completions = llm.generate(load.prompts, params)
        assert all(len(each.token_ids) == load.answer_tokens for each in completions)

    return f"attention by {llm.attention_backend}, {llm.attention_way}", run


def _transformers(load: Load) -> tuple[str, Callable[[], None]]:
    import transformers
    from transformers import ContinuousBatchingConfig, GenerationConfig

    transformers.logging.set_verbosity_error()
    attention = "paged|sdpa"
    if not load.emulated:
        try:
            import flash_attn  # noqa: F401

            attention = "paged|flash_attention_2"
        except ImportError:
            pass
    model = _model(load, attn_implementation=attention)
    block = 32
    tokens = load.max_model_len * NUM_REQUESTS
    wanted = {
        "page_size": block,
        "block_size": block,  # as it was called before
        "num_blocks": -(-tokens // block) + NUM_REQUESTS,
        "max_batch_tokens": 256 if load.emulated else 8192,
        "allow_block_sharing": False,
    }
    known = inspect.signature(ContinuousBatchingConfig).parameters
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            **{name: value for name, value in wanted.items() if name in known}
        ),
    )
    manager.start()

    def run() -> None:
        names = {
            manager.add_request(prompt, max_new_tokens=load.answer_tokens)
            for prompt in load.prompts
        }
        while names:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its thread has ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                names.discard(result.request_id)

    return f"Transformers {transformers.__version__}, {attention}, pages of {block}", run
