"""A part: a Qwen3-4B-shaped random model, many requests at once, by Quire, by Transformers'
continuous batching and, where it is installed, by vLLM: each in a process of its own, in turns.

All have the same prompts and as many tokens to give, and weights of the same shape, of one seed but
vLLM's; nothing is sampled and nothing shared. Tokens a second are those of answers.
"""

import inspect
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.setting import Setting, claim, note, show

ROUNDS = 3
PATIENCE_S = 120.0  # for a worker to start, or to finish a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What both are asked."""

    prompts: list[list[int]]
    answer_tokens: int
    max_model_len: int
    seed: int
    emulated: bool


def throughput(setting: Setting) -> None:
    """Measure tokens a second of answers, of all engines that are here."""
    load = _load(setting)
    context = get_context("spawn")
    workers: dict[str, tuple[Any, Connection]] = {}
    said: dict[str, str] = {}
    for name, serve in {"quire": _quire, "transformers": _transformers, "vllm": _vllm}.items():
        if find_spec(name) is None:
            note(f"{name} is not installed, so it was not run.")
            continue
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(serve, load, theirs), daemon=True)
        process.start()
        workers[name] = (process, ours)
        said[name] = str(_answer(process, ours))
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(1 + (1 if setting.emulated else ROUNDS)):  # the first one warms up
        for name, (process, connection) in workers.items():
            if said[name].startswith("failed"):
                continue
            connection.send("go")
            took = _answer(process, connection)
            if not isinstance(took, float):
                said[name] = str(took)
            elif number:
                seconds[name].append(took)
                print(f"{name}: {took:.2f} s")
    for process, connection in workers.values():
        if process.is_alive():
            connection.send("end")
            process.join(10)
            process.kill()
    _compare(load, said, seconds)


def _compare(load: Load, said: dict[str, str], seconds: dict[str, list[float]]) -> None:
    num_requests = len(load.prompts)
    tokens = num_requests * load.answer_tokens
    rates = {name: [tokens / each for each in took] for name, took in seconds.items() if took}
    rows = []
    for name, how in said.items():
        each = rates.get(name, [0.0])
        speeds = (statistics.median(each), min(each), max(each))
        rows.append([name, *(f"{speed:,.0f}" for speed in speeds), how])
    mean = sum(map(len, load.prompts)) / num_requests
    title = f"{num_requests} requests of {mean:.0f} tokens, {load.answer_tokens} to each answer"
    show(title, "engine | tokens/s | least | most | how", rows)
    peers = {"transformers": "Transformers' continuous batching", "vllm": "vLLM"}
    for peer in said.keys() & peers:
        pairs = zip(rates.get("quire", ()), rates.get(peer, ()), strict=False)
        ratio = statistics.median([a / b for a, b in pairs] or [0.0])
        claim(
            f"throughput at {num_requests} requests beside {peers[peer]}",
            statistics.median(rates.get("quire", [0.0])),
            statistics.median(rates.get(peer, [0.0])),
            "tokens/s",
            ">= 1.0",
            ratio >= 1,
            ratio,
            timed=True,
        )
    if said["quire"].startswith("failed"):  # of which no speed is told
        raise RuntimeError(said["quire"])


def _load(setting: Setting) -> Load:
    generator = torch.Generator().manual_seed(setting.seed)
    lengths = (4, 12) if setting.emulated else (128, 896)
    num_requests = 4 if setting.emulated else 64
    prompts = [
        torch.randint(3, 190, (int(length),), generator=generator).tolist()
        for length in torch.randint(*lengths, (num_requests,), generator=generator)
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


def _shape(load: Load) -> dict[str, Any]:
    """Of a configuration: Qwen3-4B's."""
    shape: dict[str, Any] = dict(
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
    return dict(**shape, max_position_embeddings=40_960, tie_word_embeddings=True)


def _model(load: Load, **given: Any) -> Any:
    """Random weights in bfloat16, on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(load.seed)
    with torch.device("cpu" if load.emulated else "cuda"):
        made = AutoModelForCausalLM.from_config(
            Qwen3Config(**_shape(load)), dtype=torch.bfloat16, **given
        )
    return made.eval()


def _pool_bytes(load: Load) -> int:
    return load.max_model_len * len(load.prompts) * (512 if load.emulated else 147_456)


def _quire(load: Load) -> tuple[str, Callable[[], None]]:
    from quire import LLM, SamplingParams

    room = _pool_bytes(load) * 2
    llm = LLM(
        _model(load),
        max_num_seqs=len(load.prompts),
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
    tokens = load.max_model_len * len(load.prompts)
    wanted = {
        "page_size": block,
        "block_size": block,  # as it was called before
        "num_blocks": -(-tokens // block) + len(load.prompts),
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


def _vllm(load: Load) -> tuple[str, Callable[[], None]]:
    """Its own random weights: it reads a model's configuration, and no weights, from a folder."""
    import vllm
    from transformers import Qwen3Config

    with TemporaryDirectory() as folder:
        Qwen3Config(**_shape(load), architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=load.seed,
            max_model_len=load.max_model_len,
            max_num_seqs=len(load.prompts),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.4,  # the others have theirs
            kv_cache_memory_bytes=_pool_bytes(load),
        )
    params = vllm.SamplingParams(
        max_tokens=load.answer_tokens, temperature=0, ignore_eos=True, detokenize=False
    )

    def run() -> None:
        done = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in load.prompts], params, use_tqdm=False
        )
        assert all(len(each.outputs[0].token_ids) == load.answer_tokens for each in done)

    return f"vLLM {vllm.__version__}", run
