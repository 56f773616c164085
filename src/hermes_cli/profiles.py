"""Alias of `hermes.core.home`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.core import home

sys.modules[__name__] = home
