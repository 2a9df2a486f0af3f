"""vLLM's flags that Quire does not have: what each means here. Data only; ``vllm`` reads it.

Flags of the same name and meaning are in no table: they are Quire's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag that changes nothing here: said where that is harmless, refused where it is not.

    A switch has the value "on", or "off" as ``--no-…``.
    """

    flag: str
    here: str  # what is so instead: said, or the reason of a refusal
    harmless: tuple[str, ...] | None = ()  # values that may be given; None: all
    switch: bool = False
    short: tuple[str, ...] = ()


ANY = None

FOREIGN: tuple[Foreign, ...] = (
    # -- one model, on one machine
    *(
        Foreign(flag=flag, harmless=("1",), here="heads are divided, and nothing else", short=short)
        for flag, short in (
            ("--pipeline-parallel-size", ("-pp",)),
            ("--data-parallel-size", ("-dp",)),
            ("--decode-context-parallel-size", ("-dcp",)),
            ("--nnodes", ("-n",)),
        )
    ),
    Foreign(
        flag="--enable-expert-parallel", switch=True, here="heads are divided, and nothing else"
    ),
    Foreign(
        flag="--distributed-executor-backend",
        harmless=("mp", "uni"),
        here="ranks are processes of this machine",
    ),
    Foreign(
        flag="--api-server-count", harmless=("1",), short=("-asc",), here="one process answers"
    ),
    Foreign(flag="--headless", switch=True, here="the engine and its API are one process"),
    Foreign(flag="--disable-custom-all-reduce", switch=True, harmless=ANY, here="there is none"),
    Foreign(
        flag="--cpu-offload-gb",
        harmless=("0", "0.0"),
        here="what a GPU has no room for stays in CPU memory",
    ),
    # -- how a step is computed
    Foreign(
        flag="--compilation-config",
        harmless=ANY,
        short=("-cc", "-O"),
        here="torch compiles nothing here",
    ),
    *(
        Foreign(flag=flag, harmless=ANY, here="CUDA graphs are captured up to --max-num-seqs")
        for flag in ("--max-seq-len-to-capture", "--cuda-graph-sizes")
    ),
    Foreign(
        flag="--enable-chunked-prefill",
        switch=True,
        harmless=("on",),
        here="a prompt is always computed in chunks of --max-num-batched-tokens; raise that to "
        "--max-model-len to have each in one",
    ),
    *(
        Foreign(
            flag=flag,
            harmless=harmless,
            here="--max-num-batched-tokens bounds what all prompts take of a step",
        )
        for flag, harmless in (
            ("--long-prefill-token-threshold", ("0",)),
            ("--max-num-partial-prefills", ("1",)),
            ("--max-long-partial-prefills", ("1",)),
        )
    ),
    Foreign(
        flag="--async-scheduling",
        switch=True,
        harmless=ANY,
        here="a step is planned in microseconds, between two others",
    ),
    Foreign(flag="--num-scheduler-steps", harmless=("1",), here="each step is planned"),
    Foreign(flag="--scheduler-delay-factor", harmless=("0", "0.0"), here="no prompt is delayed"),
    Foreign(
        flag="--preemption-mode",
        harmless=("recompute",),
        here="a sequence that makes room computes again; with --swap-space it is swapped where "
        "that is faster",
    ),
    # -- the cache
    Foreign(
        flag="--prefix-caching-hash-algo",
        here="prefixes are found by their token ids, not by a hash: there is none to choose "
        "(docs/decisions/0006)",
    ),
    Foreign(
        flag="--calculate-kv-scales", switch=True, harmless=ANY, here="each entry has its scale"
    ),
    Foreign(flag="--disable-sliding-window", switch=True, here="windows are as the model has them"),
    Foreign(
        flag="--disable-hybrid-kv-cache-manager",
        switch=True,
        harmless=("off",),
        here="groups of layers keep what each of them needs",
    ),
    Foreign(flag="--use-v2-block-manager", switch=True, harmless=ANY, here="there is one pool"),
    Foreign(
        flag="--kv-offloading-backend",
        harmless=("native",),
        here="swapped sequences lie in memory, or in a file at --swap-path",
    ),
    Foreign(flag="--kv-transfer-config", here="the cache is this process's own"),
    Foreign(flag="--kv-events-config", here="blocks are announced to no other process"),
    Foreign(
        flag="--enable-sleep-mode",
        switch=True,
        harmless=ANY,
        here="POST /sleep is there in any case, with an admin key; and an idle cache gives its "
        "memory back by itself",
    ),
    # -- what is loaded
    Foreign(
        flag="--trust-remote-code",
        switch=True,
        harmless=("off",),
        here="Quire never runs code from a model's folder",
    ),
    Foreign(
        flag="--trust-request-chat-template",
        switch=True,
        here="a request brings no template: --chat-template is the operator's",
    ),
    Foreign(
        flag="--load-format", harmless=("auto", "hf", "safetensors"), here="safetensors, or .bin"
    ),
    Foreign(flag="--model-impl", harmless=("auto", "transformers"), here="Transformers' own code"),
    *(
        Foreign(flag=flag, harmless=harmless, here="models generate text, and decoders embed it")
        for flag, harmless in (
            ("--runner", ("auto", "generate", "pooling")),
            ("--task", ("auto", "generate", "embed", "embedding")),
            ("--convert", ("auto", "none", "embed")),
        )
    ),
    Foreign(flag="--config-format", harmless=("auto", "hf"), here="config.json is read"),
    Foreign(flag="--tokenizer-mode", harmless=("auto", "hf"), here="Transformers' tokenizer"),
    *(
        Foreign(flag=flag, here="a model's folder brings its own; change it there")
        for flag in (
            *("--tokenizer", "--hf-config-path", "--hf-overrides", "--rope-scaling"),
            "--rope-theta",
        )
    ),
    *(
        Foreign(flag=flag, here="fetch that revision into a folder, and name the folder")
        for flag in ("--revision", "--code-revision", "--tokenizer-revision")
    ),
    Foreign(flag="--hf-token", here="set HF_TOKEN in the environment"),
    Foreign(flag="--download-dir", here="set HF_HOME in the environment"),
    *(
        Foreign(flag=flag, switch=switch, here="adapters are not there yet")
        for flag, switch in (
            *(("--enable-lora", True), ("--lora-modules", False), ("--max-loras", False)),
            ("--max-lora-rank", False),
        )
    ),
    Foreign(flag="--limit-mm-per-prompt", harmless=ANY, here="prompts are text"),
    # -- code from elsewhere
    *(
        Foreign(flag=flag, here="no code from elsewhere runs in the server")
        for flag in (
            *("--middleware", "--logits-processors", "--logits-processor-pattern"),
            *("--tool-parser-plugin", "--reasoning-parser-plugin", "--tool-server"),
        )
    ),
    # -- requests and answers
    Foreign(
        flag="--enable-prompt-tokens-details",
        switch=True,
        harmless=("on",),
        here="usage always says how many tokens of the prompt were cached",
    ),
    Foreign(
        flag="--enable-auto-tool-choice",
        switch=True,
        harmless=("on",),
        here="tool_choice auto is there as soon as --tool-call-parser says how to read the calls",
    ),
    Foreign(
        flag="--enable-force-include-usage",
        switch=True,
        harmless=("off",),
        here="a stream says its usage when stream_options asks for it",
    ),
    Foreign(flag="--response-role", harmless=("assistant",), here="answers are the assistant's"),
    Foreign(
        flag="--chat-template-content-format",
        harmless=("auto",),
        here="the template's own form is found",
    ),
    Foreign(
        flag="--default-chat-template-kwargs", here="a request brings its chat_template_kwargs"
    ),
    Foreign(
        flag="--override-generation-config",
        here="give --generation-config a folder with the generation_config.json you want",
    ),
    *(
        Foreign(flag=flag, harmless=("auto", "guidance", "llguidance"), here="llguidance is used")
        for flag in ("--guided-decoding-backend", "--structured-outputs-config.backend")
    ),
    # -- logs
    Foreign(
        flag="--enable-log-requests",
        switch=True,
        harmless=("off",),
        here="prompts are in no log; a line a request is, with --uvicorn-log-level info",
    ),
    Foreign(
        flag="--disable-log-requests", switch=True, harmless=("on",), here="prompts are in no log"
    ),
    Foreign(
        flag="--enable-log-outputs", switch=True, harmless=("off",), here="answers are in no log"
    ),
    Foreign(flag="--max-log-len", harmless=ANY, here="prompts are in no log"),
    Foreign(flag="--log-config-file", here="logs go to standard error: --uvicorn-log-level"),
    Foreign(
        flag="--enable-server-load-tracking",
        switch=True,
        harmless=ANY,
        here="GET /load is there in any case, with an admin key; /metrics has more",
    ),
    Foreign(flag="--show-hidden-metrics-for-version", harmless=ANY, here="no metric is hidden"),
    Foreign(flag="--collect-detailed-traces", here="traces are as detailed as they are"),
    # -- HTTP
    *(
        Foreign(flag=flag, harmless=('["*"]', "*"), here="any is let through")
        for flag in ("--allowed-methods", "--allowed-headers")
    ),
    Foreign(
        flag="--allow-credentials",
        switch=True,
        harmless=("off",),
        here="clients send a key, never a cookie",
    ),
    Foreign(
        flag="--ssl-cert-reqs", harmless=("0",), here="let a proxy ask for clients' certificates"
    ),
    Foreign(flag="--ssl-ca-certs", here="let a proxy ask for clients' certificates"),
    Foreign(
        flag="--enable-ssl-refresh",
        switch=True,
        harmless=("off",),
        here="certificates are read at the start; let a proxy renew them",
    ),
    Foreign(flag="--disable-fastapi-docs", switch=True, harmless=ANY, here="FastAPI is not used"),
)

# Ours, for a value of vLLM's flag that is a word of its own.
STRATEGY_WORDS: Mapping[str, str] = MappingProxyType(
    {"prealloc": "contiguous", "grow": "growing", "vmem": "virtual"}
)
DTYPE_WORDS: Mapping[str, str] = MappingProxyType({"half": "float16", "float": "float32"})
