"""Lengths as they are met in production: of each prompt and of its answer, in order of arrival.

The trace itself is not part of this repository: ``AzureLLMInferenceTrace_conv.csv`` of
Azure/AzurePublicDataset (CC-BY 4.0; Splitwise, ISCA'24), 19,366 requests of one hour. It has no
texts, so that nothing can be shared between its prompts.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.traces import open_trace

AZURE = "AzureLLMInferenceTrace_conv.csv"


class TraceUnavailable(RuntimeError):
    """The trace cannot be read here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of one request, in tokens."""

    prompt_tokens: int
    output_tokens: int

    @property
    def final_tokens(self) -> int:
        """What the cache holds of it at the end: the last token's entry is never needed."""
        return self.prompt_tokens + self.output_tokens - 1

    def scaled(self, divisor: int) -> "Lengths":
        return Lengths(
            prompt_tokens=max(1, round(self.prompt_tokens / divisor)),
            output_tokens=max(1, round(self.output_tokens / divisor)),
        )


def azure(folder: Path) -> list[Lengths]:
    """Raises: TraceUnavailable if the folder has no such file."""
    path = folder / AZURE
    if not path.exists():
        raise TraceUnavailable(f"there is no {AZURE} in the traces' folder")
    return [
        Lengths(prompt_tokens=each.input_tokens, output_tokens=each.output_tokens)
        for each in open_trace(path)
    ]
