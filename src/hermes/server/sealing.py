"""Data that a client keeps for us and cannot read or change: encrypted with a key of this home's servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

    from hermes.server.context import ServerContext

_META = "seal_key"


class Broken(ValueError):
    """Not sealed here, or for another owner, or changed since."""


class Seal:
    """Data sealed for one owner cannot be opened for another."""

    def __init__(self, key: str) -> None:
        from cryptography.fernet import Fernet

        self._box: Fernet = Fernet(key)

    def close(self, kind: str, owner: str, data: object) -> str:
        return self._box.encrypt(msgspec.json.encode([kind, owner, data])).decode()

    def open(self, kind: str, owner: str, text: str) -> Any:
        """Raises Broken."""
        from cryptography.fernet import InvalidToken

        try:
            payload = msgspec.json.decode(self._box.decrypt(text.encode()))
        except (InvalidToken, ValueError) as error:
            raise Broken("It was not sealed by this server, or was changed.") from error
        if payload[:2] != [kind, owner]:
            raise Broken("It was sealed for something else.")
        return payload[2]


async def seal_of(context: ServerContext) -> Seal:
    """The key is made when first needed."""
    if context.seal is None:
        from cryptography.fernet import Fernet

        db = context.database()
        key = await db.get_meta(_META)
        if key is None:
            await db.set_meta(_META, Fernet.generate_key().decode())
            key = await db.get_meta(_META)
        context.seal = Seal(str(key))
    seal: Seal = context.seal
    return seal
