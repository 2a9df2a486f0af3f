"""Registries: the names under which a seam's implementations are chosen, open to other packages.

Each seam's room has one: ``quire.kv.STRATEGIES`` and ``EVICTION_POLICIES``,
``quire.attention.BACKENDS``, ``quire.memory.PROVIDERS``. An implementation of another package gets
its name by an entry point in the seam's group, or by a call of ``register`` in this process. Every
option that takes such a name asks the registry, so a new name needs a change nowhere else.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar, final

from quire.errors import ConfigError, QuireError, one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


@final
class Registry(Mapping[str, T], Generic[T]):
    """Implementations of one seam by name: Quire's own, registered ones, and entry points.

    An entry point is loaded when its name is looked up, not before: a package that is broken
    disturbs only callers that choose it. Quire's own names cannot be replaced.
    """

    def __init__(
        self,
        kind: str,  # what a message calls an implementation: "cache strategy"
        group: str,  # of entry points: "quire.strategies"
        own: Mapping[str, T],
        check: Callable[[T], str | None] = lambda _: None,  # why an object is none of this seam
    ) -> None:
        self.kind, self.group = kind, group
        self._own, self._check = dict(own), check
        self._registered: dict[str, T] = {}
        self._found: dict[str, list[EntryPoint]] | None = None  # None: not looked for yet

    def __getitem__(self, name: str) -> T:
        """Find an implementation. Raises: KeyError for an unknown name; ConfigError if it fails."""
        for known in (self._own, self._registered):
            if name in known:
                return known[name]
        return self._loaded(name, self._entry_points()[name])

    def __iter__(self) -> Iterator[str]:
        """List every name, Quire's own first."""
        yield from self._own
        yield from self._registered
        yield from (name for name in self._entry_points() if name not in self._registered)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Tell whether the name is known, without loading what it stands for."""
        if not isinstance(name, str):  # from a caller's keyword: a list has no hash
            return False
        return name in self._own or name in self._registered or name in self._entry_points()

    @property
    def own_names(self) -> tuple[str, ...]:
        """Return Quire's own names, without a look at what is installed (some 40 ms)."""
        return tuple(self._own)

    def is_local(self, name: str) -> bool:
        """Tell whether a call of ``register`` gave the name: other processes do not know it."""
        return name in self._registered

    def find(self, name: str, option: str) -> T:
        """Find the implementation that an option names.

        Raises: ConfigError, which names the option and all known names, or says what fails.
        """
        self.require(name, option)
        return self[name]

    def require(self, name: str, option: str) -> None:
        """Raise ConfigError for an unknown name, without loading what a known one stands for."""
        if name not in self:
            raise ConfigError(
                f"{option}={name!r} is no {self.kind}; known: {', '.join(self)}. Another package "
                f"adds one by an entry point in the group {self.group!r}."
            )

    def register(self, name: str, implementation: T) -> None:
        """Give an implementation a name in this process; a later call with that name replaces it.

        Processes that this one starts do not see it: where an engine has several, use an entry
        point.

        Raises: ConfigError for a name of Quire's own, or for an object that is none of this seam.
        """
        if name in self._own:
            raise ConfigError(f"{self.kind} {name!r} is Quire's own: register another name")
        if (why := self._check(implementation)) is not None:
            raise ConfigError(f"{self.kind} {name!r}: {why}")
        self._registered[name] = implementation

    def unregister(self, name: str) -> None:
        """Take a registered name back. Raises: KeyError if it is not registered."""
        del self._registered[name]

    @contextmanager
    def blamed(self, name: str, option: str) -> Iterator[None]:
        """Have an error of another package's code name the option, as a ConfigError.

        Errors of Quire, and those of its own implementations, are as they were raised.
        """
        try:
            yield
        except Exception as error:  # a package's code raises what it likes
            if name in self._own or isinstance(error, QuireError):
                raise
            raise ConfigError(
                f"{option}={name!r}: this {self.kind} cannot be made: {one_line(error)}"
            ) from error

    def _entry_points(self) -> "dict[str, list[EntryPoint]]":
        if self._found is None:
            from importlib.metadata import entry_points  # 20 ms, for names that are not Quire's own

            self._found = {}
            for each in entry_points(group=self.group):
                if each.name not in self._own:
                    self._found.setdefault(each.name, []).append(each)
        return self._found

    def _loaded(self, name: str, found: "list[EntryPoint]") -> T:
        places = [
            f"entry point {each.value!r}" + (f" of {each.dist.name}" if each.dist else "")
            for each in found
        ]
        if len(found) > 1:
            raise ConfigError(
                f"{self.kind} {name!r} is in several packages: {'; '.join(places)}: uninstall all "
                f"but one"
            )
        place = f"{self.kind} {name!r} ({places[0]})"
        try:
            implementation: T = found[0].load()
        except Exception as error:  # a package's import raises what it likes
            raise ConfigError(f"{place} cannot be loaded: {one_line(error)}") from error
        if (why := self._check(implementation)) is not None:
            raise ConfigError(f"{place}: {why}")
        return implementation
