"""What a server says of itself when it begins."""

from dataclasses import dataclass

from quire.config import ServerConfig
from quire.engine.async_llm import AsyncLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Facts, to be shown once."""

    url: str
    model: str  # as clients call it
    strategy: str
    kv_bytes: int
    kv_tokens: int  # that these hold, while nothing is forgotten
    kv_bound: str  # what decided that they are so many
    max_model_len: int
    num_longest: float  # sequences of that length that fit
    max_num_seqs: int
    num_keys: int
    has_admin_key: bool
    is_local: bool

    @property
    def is_open(self) -> bool:
        """Whether clients of other machines may ask, and need no key."""
        return not self.is_local and not self.num_keys


def start_up(llm: AsyncLLM, config: ServerConfig, url: str) -> StartUp:
    """Of an engine and how it is served."""
    own = llm.llm
    kv_bytes = own.ledger.kv_bytes
    return StartUp(
        url=url,
        model=config.served_model_name[0] if config.served_model_name else own.name,
        strategy=own.config.cache,
        kv_bytes=kv_bytes,
        kv_tokens=kv_bytes // max(1, own.spec.bytes_per_token),
        kv_bound=own.ledger.bound,
        max_model_len=own.max_model_len,
        num_longest=kv_bytes / max(1, own.spec.bytes_for(own.max_model_len)),
        max_num_seqs=own.config.max_num_seqs,
        num_keys=len(set(config.api_key)),
        has_admin_key=bool(config.admin_api_key),
        is_local=config.is_local,
    )
