"""Run the same prompts under every strategy, and record the memory that each takes over time.

All runs have one model and one schedule, and figures are sampled after every step. So their lines
can be compared: step n computes the same tokens in all of them. Where the model can be served so,
they are batch-invariant, for batches differ: some strategies make room for fewer sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.figures import Line, line_chart
from quire.kv import STRATEGIES, Usage
from quire.sampling_params import SamplingParams
from quire.units import format_bytes

if TYPE_CHECKING:
    from quire.models.loader import LoadedModel

# Prompts of very different lengths, which a model of Python sources can continue.
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def read_config(path):\n    """Read a configuration file and return a dictionary."""\n',
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "class Node:\n    def __init__(self, value, next=None):\n",
    'def parse_args(args):\n    """Parse the command line."""\n    parser = ',
    "try:\n    import json\nexcept ImportError:\n",
    "for line in lines:\n    line = line.strip()\n    if not line:\n        continue\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRun:
    """The run of one strategy."""

    strategy: str
    history: tuple[Usage, ...]  # after each step
    texts: tuple[str, ...]
    num_output_tokens: int
    elapsed_s: float
    reserved_bytes: int
    peak_committed_bytes: int
    returned_bytes: int
    left_bytes: int  # committed once every sequence has ended
    not_invariant: str  # why its texts may depend on the batch; empty: they do not

    @property
    def peak(self) -> Usage:
        """Return the usage of the step with the most committed bytes, then the most used."""
        return max(self.history, key=lambda usage: (usage.committed_bytes, usage.used_bytes))

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s


def lengths(num_prompts: int, longest: int) -> list[int]:
    """Return output lengths from a quarter of ``longest`` up, so that sequences end one by one."""
    return [max(1, longest * (1 + index % 4) // 4) for index in range(num_prompts)]


def compare(
    loaded: "LoadedModel",
    prompts: Sequence[str],
    params: Sequence[SamplingParams],
    *,
    report: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> list[StrategyRun]:
    """Run prompts with their params under Quire's strategies and that of the options.

    ``report`` receives each strategy's name. The runs are batch-invariant unless an option says
    otherwise, or the model cannot be served so.
    """
    runs: list[StrategyRun] = []
    why_not = "" if options.setdefault("batch_invariant", True) else "batch_invariant is off"
    for strategy in dict.fromkeys((*STRATEGIES.own_names, options.get("cache", "paged"))):
        report(strategy)
        try:
            runs.append(_run(loaded, strategy, prompts, params, options, why_not))
        except ConfigError as error:
            if runs or not options["batch_invariant"]:
                raise
            why_not, options["batch_invariant"] = str(error), False
            runs.append(_run(loaded, strategy, prompts, params, options, why_not))
    return runs


def picture(runs: Sequence[StrategyRun], *, subtitle: str) -> str:
    """Draw the committed bytes over the steps, a line per strategy, as an SVG file."""
    needed = Line(
        label="the tokens' own bytes",
        values=[usage.used_bytes for usage in runs[0].history],
        filled=True,
    )
    lines = [
        Line(label=run.strategy, values=[usage.committed_bytes for usage in run.history])
        for run in runs
    ]
    return line_chart(
        [needed, *lines],
        title="KV memory committed while the same prompts run",
        subtitle=subtitle,
        x_label="step",
        format_value=lambda value: format_bytes(value).replace(".00", "") if value else "0",
        tick_base=1024,
    )


def _run(
    loaded: "LoadedModel",
    strategy: str,
    prompts: Sequence[str],
    params: Sequence[SamplingParams],
    options: dict[str, Any],
    not_invariant: str,
) -> StrategyRun:
    from quire.engine.llm import LLM

    history: list[Usage] = []
    # Without a prefix cache all committed memory is that of running sequences.
    own = {"cache": strategy, "enable_prefix_caching": False}
    with LLM(loaded, **{**options, **own}) as llm:
        begin = perf_counter()
        completions = llm.generate(list(prompts), list(params), observe=history.append)
        elapsed_s = perf_counter() - begin
        memory = llm.memory
        return StrategyRun(
            strategy=strategy,
            history=tuple(history),
            texts=tuple(completion.text for completion in completions),
            num_output_tokens=sum(len(completion.token_ids) for completion in completions),
            elapsed_s=elapsed_s,
            reserved_bytes=memory.reserved_bytes,
            peak_committed_bytes=memory.peak_committed_bytes,
            returned_bytes=memory.returned_bytes,
            left_bytes=memory.committed_bytes,
            not_invariant=not_invariant,
        )
