"""Alias of `hermes.store.sessions`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.store import sessions

sys.modules[__name__] = sessions
