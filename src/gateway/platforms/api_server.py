"""Alias of `hermes.server.adapter`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.server import adapter

sys.modules[__name__] = adapter
