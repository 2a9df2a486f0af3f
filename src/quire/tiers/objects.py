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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, final

from quire.errors import ConfigError
from quire.tiers.address import TierAddress
from quire.tiers.tier import Deadline, Name, TierError, TierTraits, TierUsage

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

T = TypeVar("T")

_REQUESTS = 16  # side by side
_MOST_REQUESTS = 256
_RETRIES = 2  # of a request; obstore's own are 10, in three minutes
_REQUEST_S = timedelta(seconds=10)  # after which a late one gives its thread back
_SHOWN_CHARACTERS = 300  # of an error's text

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
        raise ConfigError(f"{where} needs the package obstore: pip install quire[objects]")
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
        self._folder, self._num_requests = f"quire/{namespace}", num_requests
        # Not obstore's coroutines: a process that ends soon after one of them may be aborted.
        self._workers = ThreadPoolExecutor(num_requests, "quire-objects")
        self._is_closed = False

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        return self._run_of(
            len(names), lambda i: self._size(names[i]), lambda _, size: size is not None, deadline
        )

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        from obstore import get

        def fetch(i: int) -> "Bytes | None":
            found = get(self._store, self._path(names[i]))
            return found.bytes() if found.meta["size"] == len(into[i]) else None

        def copy(i: int, data: "Bytes | None") -> bool:  # here, so that none comes late
            if data is None or len(data) != len(into[i]):
                return False
            into[i][:] = memoryview(data)
            return True

        return self._run_of(len(names), fetch, copy, deadline)

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        from obstore import put

        def keep(i: int) -> None:
            # A look is cheaper than to write again what another machine has written.
            if self._size(names[i]) == len(records[i]):
                return
            try:  # a copy: the caller may write into the record once the deadline has passed
                put(self._store, self._path(names[i]), bytes(records[i]), use_multipart=False)
            except FileNotFoundError:
                raise TierError(f"{self._label}: there is no such bucket") from None

        return self._run_of(len(names), keep, lambda *_: True, deadline)

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        from obstore import delete

        def forget(i: int) -> None:
            with suppress(FileNotFoundError):
                delete(self._store, self._path(names[i]))

        self._run_of(len(names), forget, lambda *_: True, deadline)

    def usage(self) -> TierUsage:
        return TierUsage()

    def close(self) -> None:
        self._is_closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _path(self, name: Name) -> str:
        return f"{self._folder}/{name.hex()}"

    def _size(self, name: Name) -> int | None:
        """Ask for a record's bytes: None where it is not there."""
        from obstore import head

        try:
            return head(self._store, self._path(name))["size"]
        except FileNotFoundError:
            return None

    def _run_of(
        self,
        num: int,
        work: Callable[[int], T],  # in a thread; FileNotFoundError: there is no record
        is_good: Callable[[int, T], bool],  # here, in order
        deadline: Deadline,
    ) -> int:
        """Do so many pieces of work side by side, and count the good ones from the first one on.

        Raises: TierError if the first fails for another reason than that there is no record.
        """
        if self._is_closed:
            raise TierError(f"{self._label}: closed")
        num_good = num_begun = 0
        under_way: deque[Future[T]] = deque()
        try:
            while num_good < num:
                deadline.check(self._label)
                while num_begun < min(num, num_good + self._num_requests):
                    under_way.append(self._workers.submit(work, num_begun))
                    num_begun += 1
                if not is_good(num_good, under_way.popleft().result(deadline.left_s)):
                    break
                num_good += 1
        except FileNotFoundError:
            pass
        except Exception as error:  # obstore's, and Python's own for some of them
            if not num_good:
                raise self._failure(error) from None
        finally:
            for future in under_way:
                future.cancel()
        return num_good

    def _failure(self, error: Exception) -> TierError:
        if isinstance(error, TierError):
            return error
        told = "out of time" if isinstance(error, TimeoutError) else _in_words(error)
        return TierError(f"{self._label}: {told}")


def _in_words(error: Exception) -> str:
    """Return the first line of obstore's text, which has a page of structures behind it."""
    line = str(error).partition("\n")[0]
    return _QUERY.sub("", line)[:_SHOWN_CHARACTERS] or type(error).__name__


def _parse_requests(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_REQUESTS:
        raise ValueError(f"a number from 1 to {_MOST_REQUESTS}")
    return int(text)
