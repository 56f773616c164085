"""Types for plain JSON without a closer type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]
# A message of a conversation in canonical form: role, content, tool_calls, tool_call_id, …
Message = dict[str, Any]
