"""Alias of `hermes.tools.framework.toolsets`: the same module object, so that a name replaced here is replaced there."""

import sys

from hermes.tools.framework import toolsets

sys.modules[__name__] = toolsets
