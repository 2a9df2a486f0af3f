"""``ObjectTier``: records in a bucket of S3, Google Cloud Storage or Azure, by the package obstore.

    s3://BUCKET[/FOLDER]?region=…&endpoint=…    also MinIO, Ceph and others, by their endpoint
    gs://BUCKET[/FOLDER]
    az://CONTAINER[/FOLDER]?account=…

A record is the object ``FOLDER/quire/NAMESPACE/NAME``, whole: a part of one is no use. The requests
of a call run side by side, since each waits for tens of milliseconds. Credentials are read by
obstore where each store's own tools read them (AWS_ACCESS_KEY_ID, a role of the machine, …), never
from an address. A bucket's lifecycle rule forgets old records.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from quire.errors import ConfigError
from quire.tiers.address import TierAddress
from quire.tiers.blocking_calls import BlockingCalls
from quire.tiers.tier import Deadline, Name, TierError, TierTraits, TierUsage

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

_REQUESTS = 16  # side by side
_MOST_REQUESTS = 256
_LISTED = 1000  # objects that are deleted at once
_RETRIES = 2  # of a request; obstore's own are 10, in three minutes
_REQUEST_S = timedelta(seconds=10)  # after which a late one gives its thread back

# Options of an address, and what obstore calls them.
_STORE_OPTIONS = MappingProxyType(
    {
        "s3": {"region": "region", "endpoint": "endpoint"},
        "gs": {},
        "az": {"account": "account_name", "endpoint": "endpoint"},
    }
)
# A signature, as Azure's may stand in an address.
_QUERY = re.compile(r"\?[^\s)]+")


def open_objects(address: TierAddress, record_bytes: int, namespace: str) -> "ObjectTier":
    """Make the tier of an address. Nothing is asked for yet.

    ``record_bytes`` is the largest record's size. Raises: ConfigError, also without obstore.
    """
    where = f"kv_tier={address}"
    if find_spec("obstore") is None:
        raise ConfigError(f"{where} needs the package obstore: pip install 'quire-kv[objects]'")
    for name in ("age", "size"):
        if name in address.options:
            raise ConfigError(
                f"{where}: {name}={address.options[name]}: the bucket decides this, by a lifecycle "
                f"rule (docs/guides/shared-tiers.md)"
            )
    if not address.url.hostname or address.url.username or address.url.password:
        raise ConfigError(
            f"{where}: an address is {address.kind}://BUCKET/FOLDER, without a user or a password: "
            f"they are read from the environment"
        )
    known = _STORE_OPTIONS[address.kind]
    address.require_known("requests", *known)
    num_requests = address.option("requests", _parse_requests, _REQUESTS)
    config = {known[name]: value for name, value in address.options.items() if name in known}
    is_plain = config.get("endpoint", "").startswith("http://")
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    make: Callable[..., ObjectStore] = from_url  # whose config has a type for each store
    try:
        store = make(
            f"{address.kind}://{address.url.hostname}{address.url.path}",
            config=config,
            client_options={"allow_http": is_plain, "timeout": _REQUEST_S},
            retry_config={"max_retries": _RETRIES, "retry_timeout": _REQUEST_S},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{where}: {_in_words(error)}") from None
    return ObjectTier(store, str(address), namespace, num_requests)


@final
class ObjectTier:
    """Records of one namespace in one bucket."""

    traits = TierTraits(is_shared=True, is_persistent=True)

    def __init__(
        self, store: "ObjectStore", label: str, namespace: str, num_requests: int = _REQUESTS
    ) -> None:
        """``store``: any of obstore's. ``num_requests``: at most so many at once, of all calls."""
        self._store, self._label = store, label
        self._folder = f"quire/{namespace}"
        # Not obstore's coroutines: a process that ends soon after one of them may be aborted.
        self._calls = BlockingCalls(label, num_requests, _in_words)

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        return self._calls.count(
            len(names),
            lambda i: partial(self._size, names[i]),
            lambda _, size: size is not None,
            deadline,
        )

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        from obstore import get

        def fetch(path: str, num_bytes: int) -> "Bytes | None":
            found = get(self._store, path)
            return found.bytes() if found.meta["size"] == num_bytes else None

        def copy(i: int, data: "Bytes | None") -> bool:
            if data is None or len(data) != len(into[i]):
                return False
            into[i][:] = memoryview(data)
            return True

        return self._calls.count(
            len(names), lambda i: partial(fetch, self._path(names[i]), len(into[i])), copy, deadline
        )

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        from obstore import put

        def keep(name: Name, record: bytes) -> None:
            # A look is cheaper than to write again what another machine has written.
            if self._size(name) == len(record):
                return
            try:
                put(self._store, self._path(name), record, use_multipart=False)
            except FileNotFoundError:
                raise TierError(f"{self._label}: there is no such bucket") from None

        return self._calls.count(
            len(names),
            lambda i: partial(keep, names[i], bytes(records[i])),
            lambda *_: True,
            deadline,
        )

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        from obstore import delete

        def forget(path: str) -> None:
            with suppress(FileNotFoundError):
                delete(self._store, path)

        self._calls.make_all(len(names), lambda i: partial(forget, self._path(names[i])), deadline)

    def clear(self, deadline: Deadline) -> None:
        from obstore import delete
        from obstore import list as list_objects

        def forget_all() -> None:
            for several in list_objects(self._store, self._folder, chunk_size=_LISTED):
                deadline.check(f"{self._label}: clear")
                delete(self._store, [each["path"] for each in several])

        self._calls.make_all(1, lambda _: forget_all, deadline)

    def usage(self) -> TierUsage:
        self._calls.require_open()
        return TierUsage()

    def close(self) -> None:
        self._calls.close()

    def _path(self, name: Name) -> str:
        return f"{self._folder}/{name.hex()}"

    def _size(self, name: Name) -> int | None:
        """Ask for a record's bytes: None where it is not there."""
        from obstore import head

        try:
            return head(self._store, self._path(name))["size"]
        except FileNotFoundError:
            return None


def _in_words(error: Exception) -> str:
    """Return the first line of obstore's text, which has a page of structures behind it."""
    line = str(error).partition("\n")[0]
    return _QUERY.sub("", line) or type(error).__name__


def _parse_requests(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_REQUESTS:
        raise ValueError(f"a number from 1 to {_MOST_REQUESTS}")
    return int(text)
