"""Alias of `hermes.server.compat`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.server import compat

sys.modules[__name__] = compat
