"""Alias of `hermes.server.runner`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.server import runner

sys.modules[__name__] = runner
