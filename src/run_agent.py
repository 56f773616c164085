"""Alias of `hermes.facade`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes import facade

sys.modules[__name__] = facade
