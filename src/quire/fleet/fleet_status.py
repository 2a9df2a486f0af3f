"""What ``GET /fleet`` answers: each replica's state and load, and what it finds of what was
predicted. Importing this imports no torch.
"""

import msgspec


class ReplicaLoad(msgspec.Struct, kw_only=True):
    """What a replica has reported last."""

    num_running: int
    num_waiting: int
    queued_tokens: int
    kv_usage: float  # the share of the KV memory that sequences hold
    max_num_seqs: int
    compute_s_per_token: float  # where it has not measured that, what others have


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """One replica, as the door sees it."""

    name: str
    state: str
    why: str
    is_prefill: bool  # it computes prompts for others
    num_streams: int
    load: ReplicaLoad | None
    found_tokens: dict[str, int]  # that it has found since it began: device, host, store
    routed_tokens: dict[str, int]  # that it was sent, by where they were thought to be
    predicted_found_tokens: int  # of the prompts that it has begun for this door …
    real_found_tokens: int  # … and what it has found of them
    requests: dict[str, int]  # by outcome
    num_event_gaps: int


class FleetStatus(msgspec.Struct, kw_only=True):
    """All replicas of a fleet."""

    model: str  # the name for clients
    chats: bool  # it takes messages
    num_resumed_streams: int
    prefilled_prompts: dict[str, int]  # by what computed them: apart, here, failed
    replicas: list[ReplicaStatus]
