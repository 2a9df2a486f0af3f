"""What takes the place of a GPU's own ways where they fail at the start, and what is said of it.

Kernels are compiled where they run, and what chooses tokens there was written elsewhere. So both
are tried before a request is served. That a step goes on without a graph, ``models.cuda_graphs``
sees to; without memory that can be mapped, there is no engine on that device
(``memory.by_device``).
"""

import logging

import torch

from quire.attention import AUTO, BY_TORCH, AttentionFailed, fallback_backends
from quire.config import EngineConfig
from quire.devices import wait_for
from quire.engine.kv_sizing import stored_spec
from quire.errors import ConfigError, QuireError, UnsupportedModel, one_line
from quire.kv.layout import attention_groups, attention_spec
from quire.models.loader import LoadedModel

log = logging.getLogger(__name__)


class OtherAttention:
    """Of one engine: with what it is built, and then with what instead."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._config, self._loaded = config, loaded
        self._left: list[str] | None = None

    def instead(self, error: Exception) -> str:
        """The next backend, which is said aloud, after the engine could not be built.

        Raises: the error, where attention cannot be the cause or no other is left; ConfigError,
        with the option to change, where that backend was asked for.
        """
        device, asked = self._loaded.device, self._config.attention_backend
        if device.type != "cuda" or not _may_be_of_attention(error):
            raise error
        reason = one_line(error)
        try:
            wait_for(device)
        except RuntimeError:
            raise ConfigError(
                f"the GPU gives nothing but errors to this process any more, since {reason}: start "
                f"another process, with attention_backend=sdpa if it was a kernel of attention's"
            ) from error
        if asked not in (AUTO, *BY_TORCH):
            kind = UnsupportedModel if isinstance(error, UnsupportedModel) else ConfigError
            raise kind(
                f"attention_backend={asked}: {reason}. With attention_backend=sdpa torch "
                f"attends, with auto what works"
            ) from error
        if self._left is None:
            spec = stored_spec(self._config, self._loaded.spec)
            specs = [attention_spec(group) for group in attention_groups(spec.groups)]
            self._left = fallback_backends(asked, specs, device)
        if not self._left:
            raise error
        found = self._left.pop(0)
        log.warning("attention backend: %s instead, since %s", found, reason)
        return found


def _may_be_of_attention(error: Exception) -> bool:
    """Whether another backend may do better: not where memory is short or an option is wrong."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    return isinstance(error, AttentionFailed | UnsupportedModel) or not isinstance(
        error, QuireError
    )
