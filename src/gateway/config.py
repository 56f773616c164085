"""Alias of `hermes.server.settings`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.server import settings

sys.modules[__name__] = settings
