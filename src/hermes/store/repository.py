"""Base of the stores: methods that receive a transaction, and their asynchronous counterparts."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from hermes.core.json_types import JsonMapping
from hermes.store.engine import Engine, Tx

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S", bound="Repository")


class Repository:
    """A store: methods on an engine. Those marked `reads` and `writes` receive the transaction they work in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        return self._engine

    def transaction(self, work: Callable[[], R]) -> R:
        """Run `work` so that all changes it makes through this engine's stores are committed together."""
        return self._engine.write(lambda _: work())


class AsyncPart:
    """A store whose methods are coroutines; blocking work runs in the store's own threads."""

    def __init__(self, store: object) -> None:
        self.blocking = store

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # A property, or a method that the class of a stand-in does not know.
            attribute = getattr(self.blocking, name)
            return functools.partial(asyncio.to_thread, attribute) if callable(attribute) else attribute


if TYPE_CHECKING:

    class Method(Generic[P, R_co]):
        """A method of a store as mypy sees it: it blocks, and is a coroutine on the store's asynchronous counterpart."""

        @overload
        def __get__(self, store: AsyncPart, cls: type) -> Callable[P, Coroutine[Any, Any, R_co]]: ...
        @overload
        def __get__(self, store: Repository, cls: type) -> Callable[P, R_co]: ...
        @overload
        def __get__(self, store: None, cls: type) -> Callable[..., Any]: ...
        def __get__(self, store: object, cls: type) -> Any: ...


def reads(
    method: Callable[Concatenate[S, Tx, P], R], *, slow: bool = False, slow_with: Sequence[str] = ()
) -> Method[P, R]:
    """A method that reads one consistent view of the database, by an index."""
    names = list(inspect.signature(method).parameters)[2:]

    def is_slow(args: Sequence[Any], kwargs: JsonMapping) -> bool:
        if not slow_with:
            return slow
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        return any(arguments.get(name) for name in slow_with)

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        slowly = is_slow(args, kwargs)
        return self._engine.read(lambda tx: method(self, tx, *args, **kwargs), slow=slowly)

    async def soon(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        slowly = is_slow(args, kwargs)
        return await self._engine.read_soon(lambda tx: method(self, tx, *args, **kwargs), slow=slowly)

    return _method(call, soon, method)  # type: ignore[no-any-return]


def reads_slowly(method: Callable[Concatenate[S, Tx, P], R]) -> Method[P, R]:
    return reads(method, slow=True)


def reads_slowly_with(*names: str) -> Callable[[Callable[Concatenate[S, Tx, P], R]], Method[P, R]]:
    """Like `reads`; slow (many rows) if one of these arguments is given."""

    def mark(method: Callable[Concatenate[S, Tx, P], R]) -> Method[P, R]:
        return reads(method, slow_with=names)

    return mark


def writes(method: Callable[Concatenate[S, Tx, P], R]) -> Method[P, R]:
    """A method that writes in one transaction. It may run again when the transaction is retried: keep it free of side effects."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._engine.write(lambda tx: method(self, tx, *args, **kwargs), sync=bool(kwargs.get("sync")))

    async def soon(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        sync = bool(kwargs.get("sync"))
        return await self._engine.submit_write(lambda tx: method(self, tx, *args, **kwargs), sync=sync)

    return _method(call, soon, method)  # type: ignore[no-any-return]


def blocks(method: Callable[Concatenate[S, P], R]) -> Method[P, R]:
    """A method that calls others of its store: the asynchronous counterpart runs it in a thread that no read waits
    for."""

    async def soon(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._engine.apply(functools.partial(method, self, *args, **kwargs))

    method.soon = soon  # type: ignore[attr-defined]
    return method  # type: ignore[return-value]


def _method(call: Any, soon: Any, method: Any) -> Any:
    # Callers do not pass the transaction.
    signature = inspect.signature(method)
    first, _, *parameters = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=[first, *parameters])
    call.soon = soon
    return call


@functools.cache
def async_class(cls: Any) -> type[AsyncPart]:
    """The asynchronous counterpart of a store's class."""
    members = inspect.getmembers(cls, lambda member: hasattr(member, "soon"))
    return type(f"Async{cls.__name__}", (AsyncPart,), {name: _awaited(method) for name, method in members})


def _awaited(method: Any) -> Any:
    soon = method.soon

    def call(self: AsyncPart, *args: Any, **kwargs: Any) -> Any:
        return soon(self.blocking, *args, **kwargs)

    return functools.update_wrapper(call, method)
