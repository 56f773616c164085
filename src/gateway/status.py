"""Alias of `hermes.server.status`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.server import status

sys.modules[__name__] = status
