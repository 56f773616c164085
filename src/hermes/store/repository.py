"""Base of the stores: methods that get a transaction, and their asynchronous counterparts."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from hermes.store.connections import Tx
from hermes.store.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Repository")


class Repository:
    """A store: methods on an engine. Those marked `reads` and `writes` are given the transaction they work in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """What it works on; stores on one engine share its transactions."""
        return self._engine

    def transaction(self, work: Callable[[], R]) -> R:
        """Do several things as one: all that `work` asks of this engine's stores happens, or nothing."""
        return self._engine.write(lambda _: work())


def reads(
    method: Callable[Concatenate[S, Tx, P], R], *, slow: bool = False, slow_with: Sequence[str] = ()
) -> Callable[Concatenate[S, P], R]:
    """A method that looks at one consistent view of the database, and finds what it wants by an index."""
    names = list(inspect.signature(method).parameters)[2:]

    def is_slow(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if not slow_with:
            return slow
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return any(given.get(name) for name in slow_with)

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        slowly = is_slow(args, kwargs)
        return self._engine.read(lambda tx: method(self, tx, *args, **kwargs), slow=slowly)

    async def soon(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        slowly = is_slow(args, kwargs)
        return await self._engine.read_soon(lambda tx: method(self, tx, *args, **kwargs), slow=slowly)

    return _with_twin(call, soon, method)  # type: ignore[no-any-return]


def reads_slowly(method: Callable[Concatenate[S, Tx, P], R]) -> Callable[Concatenate[S, P], R]:
    """The same for what looks at many rows: it has connections and threads of its own."""
    return reads(method, slow=True)


def reads_slowly_with(
    *names: str,
) -> Callable[[Callable[Concatenate[S, Tx, P], R]], Callable[Concatenate[S, P], R]]:
    """The same for what looks at many rows when one of these arguments is given."""

    def mark(method: Callable[Concatenate[S, Tx, P], R]) -> Callable[Concatenate[S, P], R]:
        return reads(method, slow_with=names)

    return mark


def writes(method: Callable[Concatenate[S, Tx, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that writes in one transaction. It may run again when the transaction is retried: keep it free of side effects."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._engine.write(lambda tx: method(self, tx, *args, **kwargs), sync=bool(kwargs.get("sync")))

    async def soon(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        sync = bool(kwargs.get("sync"))
        return await self._engine.awrite(lambda tx: method(self, tx, *args, **kwargs), sync=sync)

    return _with_twin(call, soon, method)  # type: ignore[no-any-return]


def _with_twin(call: Any, soon: Any, method: Any) -> Any:
    # The transaction is ours to give; callers see the method without it.
    signature = inspect.signature(method)
    first, _, *rest = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=[first, *rest])
    call.soon = soon
    return call


# --- twins -----------------------------------------------------------------------------------------------------------


class AsyncPart:
    """A store whose methods are coroutines. What blocks, blocks one of the store's own threads."""

    def __init__(self, store: Any) -> None:
        self.blocking = store

    def __getattr__(self, name: str) -> Any:
        # A stand-in for a store has methods that its class does not know.
        found = getattr(self.blocking, name)
        return functools.partial(asyncio.to_thread, found) if callable(found) else found


@functools.cache
def async_class(cls: Any) -> type[AsyncPart]:
    """The class whose methods are those of a store, as coroutines."""
    made: dict[str, Any] = {"__doc__": f"`{cls.__name__}`, to be awaited."}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_"):
            made[name] = _awaited(method)
    return type(f"Async{cls.__name__}", (AsyncPart,), made)


def _awaited(method: Any) -> Any:
    soon = getattr(method, "soon", None)

    if soon is not None:

        async def call(self: AsyncPart, *args: Any, **kwargs: Any) -> Any:
            return await soon(self.blocking, *args, **kwargs)
    else:

        async def call(self: AsyncPart, *args: Any, **kwargs: Any) -> Any:
            return await self.blocking._engine.apply(functools.partial(method, self.blocking, *args, **kwargs))

    return functools.update_wrapper(call, method)
