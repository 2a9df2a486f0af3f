"""List vLLM's flags that Quire does not have, and what is true here instead. ``vllm`` reads it.

A flag of the same name and meaning is in no table: it is Quire's own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag without an effect: accepted with a note for harmless values, refused for others.

    A switch has the value "on", or "off" in its form ``--no-…``.
    """

    flag: str
    here: str  # what is true here instead: the note, or the reason of a refusal
    harmless: tuple[str, ...] | None = ()  # accepted values; None: all
    switch: bool = False
    short: tuple[str, ...] = ()


ANY = None


def _flags(
    here: str, *flags: str, harmless: tuple[str, ...] | None = (), switch: bool = False
) -> Iterator[Foreign]:
    """Make a row for each flag; its short names stand behind it, as in "--nnodes -n"."""
    for names in flags:
        flag, *short = names.split()
        yield Foreign(flag=flag, here=here, harmless=harmless, switch=switch, short=tuple(short))


def _switches(here: str, *flags: str, harmless: tuple[str, ...] | None = ()) -> Iterator[Foreign]:
    return _flags(here, *flags, harmless=harmless, switch=True)


_ON, _OFF = ("on",), ("off",)
_NO_LOG = "prompts are in no log"
_NO_CODE = "no code from outside the package runs in the server"
_OWN_FILES = "a model's folder has its own: change it there"

FOREIGN: tuple[Foreign, ...] = (
    # -- one model, on one machine
    *_flags(
        "only heads are divided",
        *("--pipeline-parallel-size -pp", "--data-parallel-size -dp"),
        *("--decode-context-parallel-size -dcp", "--nnodes -n"),
        harmless=("1",),
    ),
    *_switches("only heads are divided", "--enable-expert-parallel"),
    *_flags(
        "ranks are processes of this machine",
        "--distributed-executor-backend",
        harmless=("mp", "uni"),
    ),
    *_flags("one process answers", "--api-server-count -asc", harmless=("1",)),
    *_switches("the engine and its API are one process", "--headless"),
    *_switches("there is none", "--disable-custom-all-reduce", harmless=ANY),
    *_flags(
        "weights that do not fit on a GPU stay in CPU memory",
        "--cpu-offload-gb",
        harmless=("0", "0.0"),
    ),
    # -- how a step is computed
    *_flags("torch compiles nothing here", "--compilation-config -cc -O", harmless=ANY),
    *_flags(
        "CUDA graphs are captured up to --max-num-seqs",
        *("--max-seq-len-to-capture", "--cuda-graph-sizes"),
        harmless=ANY,
    ),
    *_switches(
        "a prompt is always computed in chunks of --max-num-batched-tokens; raise that to "
        "--max-model-len to have each in one",
        "--enable-chunked-prefill",
        harmless=_ON,
    ),
    *_flags(
        "--max-num-batched-tokens bounds the tokens of all prompts in a step",
        "--long-prefill-token-threshold",
        harmless=("0",),
    ),
    *_flags(
        "--max-num-batched-tokens bounds the tokens of all prompts in a step",
        *("--max-num-partial-prefills", "--max-long-partial-prefills"),
        harmless=("1",),
    ),
    *_switches(
        "a step is planned in microseconds, between two others",
        "--async-scheduling",
        harmless=ANY,
    ),
    *_flags("each step is planned", "--num-scheduler-steps", harmless=("1",)),
    *_flags("no prompt is delayed", "--scheduler-delay-factor", harmless=("0", "0.0")),
    *_flags(
        "a preempted sequence is computed again; with --swap-space it is swapped where that is "
        "faster",
        "--preemption-mode",
        harmless=("recompute",),
    ),
    # -- the cache
    *_flags(
        "prefixes are found by their token ids, without a hash (docs/decisions/0006)",
        "--prefix-caching-hash-algo",
    ),
    *_switches("each entry has its scale", "--calculate-kv-scales", harmless=ANY),
    *_switches("windows are as the model has them", "--disable-sliding-window"),
    *_switches(
        "each group of layers keeps only what it needs",
        "--disable-hybrid-kv-cache-manager",
        harmless=_OFF,
    ),
    *_switches("there is one pool", "--use-v2-block-manager", harmless=ANY),
    *_flags(
        "blocks go to the tiers of --kv-tier, by Quire's own code",
        "--kv-offloading-backend",
        harmless=("native",),
    ),
    *_switches(
        "POST /sleep always works with an admin key, and an idle cache returns its memory by "
        "itself",
        "--enable-sleep-mode",
        harmless=ANY,
    ),
    # -- what is loaded
    *_switches("Quire never runs code from a model's folder", "--trust-remote-code", harmless=_OFF),
    *_switches(
        "a request cannot bring a template: --chat-template is the operator's",
        "--trust-request-chat-template",
    ),
    *_flags("safetensors, or .bin", "--load-format", harmless=("auto", "hf", "safetensors")),
    *_flags("Transformers' own code", "--model-impl", harmless=("auto", "transformers")),
    *_flags(
        "models generate text, and decoders embed it",
        "--runner",
        harmless=("auto", "generate", "pooling"),
    ),
    *_flags(
        "models generate text, and decoders embed it",
        "--task",
        harmless=("auto", "generate", "embed", "embedding"),
    ),
    *_flags(
        "models generate text, and decoders embed it",
        "--convert",
        harmless=("auto", "none", "embed"),
    ),
    *_flags("config.json is read", "--config-format", harmless=("auto", "hf")),
    *_flags("Transformers' tokenizer", "--tokenizer-mode", harmless=("auto", "hf")),
    *_flags(
        _OWN_FILES,
        *("--hf-config-path", "--hf-overrides", "--rope-scaling", "--rope-theta"),
    ),
    *_flags(
        "download that revision to a folder, and name the folder",
        *("--revision", "--code-revision", "--tokenizer-revision"),
    ),
    *_flags("set HF_TOKEN in the environment", "--hf-token"),
    *_flags("set HF_HOME in the environment", "--download-dir"),
    *_switches("adapters are not supported yet", "--enable-lora"),
    *_flags("adapters are not supported yet", "--lora-modules", "--max-loras", "--max-lora-rank"),
    # -- code from elsewhere
    *_flags(
        _NO_CODE,
        *("--middleware", "--logits-processors", "--logits-processor-pattern"),
        *("--tool-parser-plugin", "--reasoning-parser-plugin", "--tool-server"),
    ),
    # -- requests and answers
    *_switches(
        "usage always has the number of cached prompt tokens",
        "--enable-prompt-tokens-details",
        harmless=_ON,
    ),
    *_switches(
        "tool_choice auto works as soon as --tool-call-parser names a parser",
        "--enable-auto-tool-choice",
        harmless=_ON,
    ),
    *_switches(
        "a stream has its usage if stream_options asks for it",
        "--enable-force-include-usage",
        harmless=_OFF,
    ),
    *_flags("answers are the assistant's", "--response-role", harmless=("assistant",)),
    *_flags(
        "the template's own format is detected",
        "--chat-template-content-format",
        harmless=("auto",),
    ),
    *_flags("a request has its own chat_template_kwargs", "--default-chat-template-kwargs"),
    *_flags(
        "give --generation-config a folder with the generation_config.json you want",
        "--override-generation-config",
    ),
    *_flags(
        "llguidance is used",
        *("--guided-decoding-backend", "--structured-outputs-config.backend"),
        harmless=("auto", "guidance", "llguidance"),
    ),
    # -- logs
    *_switches(
        "prompts are in no log; --uvicorn-log-level info logs a line per request",
        "--enable-log-requests",
        harmless=_OFF,
    ),
    *_switches(_NO_LOG, "--disable-log-requests", harmless=_ON),
    *_switches("answers are in no log", "--enable-log-outputs", harmless=_OFF),
    *_flags(_NO_LOG, "--max-log-len", harmless=ANY),
    *_flags("logs go to standard error: --uvicorn-log-level", "--log-config-file"),
    *_switches(
        "GET /load always works with an admin key; /metrics has more",
        "--enable-server-load-tracking",
        harmless=ANY,
    ),
    *_flags("no metric is hidden", "--show-hidden-metrics-for-version", harmless=ANY),
    *_flags("traces have one level of detail", "--collect-detailed-traces"),
    # -- HTTP
    *_flags("all are allowed", "--allowed-methods", "--allowed-headers", harmless=('["*"]', "*")),
    *_switches("clients send a key, never a cookie", "--allow-credentials", harmless=_OFF),
    *_flags("let a proxy check clients' certificates", "--ssl-cert-reqs", harmless=("0",)),
    *_flags("let a proxy check clients' certificates", "--ssl-ca-certs"),
    *_switches(
        "certificates are read at the start; let a proxy renew them",
        "--enable-ssl-refresh",
        harmless=_OFF,
    ),
    *_switches("FastAPI is not used", "--disable-fastapi-docs", harmless=ANY),
)

# Quire's words for values of vLLM's flags.
STRATEGY_WORDS: Mapping[str, str] = MappingProxyType(
    {"prealloc": "contiguous", "grow": "growing", "vmem": "virtual"}
)
DTYPE_WORDS: Mapping[str, str] = MappingProxyType({"half": "float16", "float": "float32"})
