"""Alias of `hermes.home`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes import home

sys.modules[__name__] = home
