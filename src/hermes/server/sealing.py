"""What a client keeps for us and cannot read or change: sealed with a key that only this home's servers have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

    from hermes.server.context import ServerContext

_META = "seal_key"


class Broken(ValueError):
    """It was not sealed here, or not for this owner, or was changed since."""


class Seal:
    """Seals and opens; what was sealed for one owner is nothing to another."""

    def __init__(self, key: str) -> None:
        from cryptography.fernet import Fernet

        self._box: Fernet = Fernet(key)

    def close(self, kind: str, owner: str, data: object) -> str:
        """The data as text that nobody else can read."""
        return self._box.encrypt(msgspec.json.encode([kind, owner, data])).decode()

    def open(self, kind: str, owner: str, text: str) -> Any:
        """The data again."""
        from cryptography.fernet import InvalidToken

        try:
            found = msgspec.json.decode(self._box.decrypt(text.encode()))
        except (InvalidToken, ValueError) as error:
            raise Broken("It was not sealed by this server, or was changed.") from error
        if found[:2] != [kind, owner]:
            raise Broken("It was sealed for something else.")
        return found[2]


async def seal_of(context: ServerContext) -> Seal:
    """The seal of this home; its key is made when first needed."""
    if context.seal is None:
        from cryptography.fernet import Fernet

        db = context.database()
        key = await db.get_meta(_META)
        if key is None:
            await db.set_meta(_META, Fernet.generate_key().decode())
            key = await db.get_meta(_META)
        context.seal = Seal(str(key))
    found: Seal = context.seal
    return found
