"""Facts about model families: one table by pattern of the model's name."""

from __future__ import annotations

import re
from fnmatch import translate
from functools import lru_cache
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.settings.schema_types import EFFORTS


class Capabilities(Struct, frozen=True):
    """What a model supports. `options` are the sampling parameters its protocol supports; `toolsets` the default ones
    of a model that can handle only few."""

    window: int = 32_768
    max_output: int = 8_192
    images: bool = True
    tools: bool = True
    reasoning: bool = False
    prefill: bool = False
    cache: bool = False
    parallel_calls: bool = True
    options: frozenset[str] = frozenset()
    toolsets: frozenset[str] | None = None


class ModelFacts(Capabilities, frozen=True):
    """One family: its capabilities, and how it is called. `thinking` is how reasoning is switched on in the messages
    protocol and `thinking_off` how it is switched off: by leaving the field out, by a value, or never.
    `reasoning_content` says whether assistant messages of the history may, or must, carry their reasoning.
    `custom_tools`: the responses protocol accepts tools whose input is text in a grammar."""

    efforts: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset({"verbosity"})
    output_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    thinking: Literal["", "budget", "adaptive"] = ""
    thinking_off: Literal["omit", "disabled", "between_tools", "never"] = "omit"
    forced_choice: bool = True
    json_schema: bool = False
    reasoning_content: Literal["refused", "accepted", "required"] = "refused"
    call_extra: JsonMapping | None = None
    custom_tools: bool = False


UNKNOWN = ModelFacts(reasoning_content="accepted")

_K, _M = 1_000, 1_000_000
_LOW_TO_HIGH = ("low", "medium", "high")
_LOW_TO_XHIGH = (*_LOW_TO_HIGH, "xhigh")
_STEERING = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop"})

# Reasoning models of one vendor refuse sampling and call the output limit by its newer name.
_O_SERIES = ModelFacts(
    200 * _K,
    100 * _K,
    reasoning=True,
    efforts=_LOW_TO_HIGH,
    refused=_STEERING | {"verbosity", "parallel_tool_calls"},
    output_key="max_completion_tokens",
)
_GPT5 = replace(
    _O_SERIES,
    window=400 * _K,
    max_output=128 * _K,
    efforts=("minimal", *_LOW_TO_HIGH),
    refused=_STEERING,
    custom_tools=True,
)
_GPT5_LONG = replace(_GPT5, window=1_050 * _K, efforts=("none", *_LOW_TO_XHIGH))
_GPT_CHAT = ModelFacts(128 * _K, 16_384, refused=_STEERING | {"verbosity"}, output_key="max_completion_tokens")

_CLAUDE = ModelFacts(200 * _K, 64 * _K, prefill=True, cache=True)
_CLAUDE_BUDGET = replace(_CLAUDE, reasoning=True, thinking="budget")
_CLAUDE_46 = replace(
    _CLAUDE, prefill=False, reasoning=True, thinking="adaptive", efforts=_LOW_TO_HIGH, json_schema=True
)
_CLAUDE_LONG = replace(
    _CLAUDE_46,
    window=_M,
    max_output=128 * _K,
    efforts=_LOW_TO_XHIGH,
    refused=frozenset({"verbosity", "temperature", "top_p"}),
)
_CLAUDE_ALWAYS = replace(_CLAUDE_LONG, thinking_off="never", forced_choice=False)

_GEMINI = ModelFacts(1_048_576, 65_536, reasoning=True, efforts=_LOW_TO_HIGH)
# Calls that another model made have no signature; this is the documented stand-in for one.
_UNSIGNED_CALL = {"google": {"thought_signature": "skip_thought_signature_validator"}}
_GROK = ModelFacts(
    256 * _K, 32 * _K, reasoning=True, refused=frozenset({"verbosity", "presence_penalty", "frequency_penalty", "stop"})
)
_OPEN = ModelFacts(131_072, 8_192, images=False, reasoning_content="accepted")
_OPEN_THINKING = replace(_OPEN, max_output=32_768, reasoning=True)
_DEEPSEEK = replace(_OPEN_THINKING, efforts=("minimal", *_LOW_TO_XHIGH), reasoning_content="required")

# First match wins. Names are lower case, without the vendor's prefix, with `-` for `.`, `:`, `_` and `@`, and end in `-`.
_ROWS: tuple[tuple[str, ModelFacts], ...] = (
    ("*claude-sonnet-5-5-*", replace(_CLAUDE_ALWAYS, thinking_off="between_tools")),
    ("*claude-*-5-5-* *claude-fable-* *claude-mythos-*", _CLAUDE_ALWAYS),
    ("*claude-opus-5-* *claude-sonnet-5-* *claude-haiku-5-*", replace(_CLAUDE_LONG, thinking_off="disabled")),
    ("*claude-*-4-7-* *claude-*-4-8-* *claude-4-7-* *claude-4-8-*", _CLAUDE_LONG),
    ("*claude-opus-4-6-* *claude-4-6-opus-*", replace(_CLAUDE_46, max_output=128 * _K)),
    ("*claude-*-4-6-* *claude-4-6-*", _CLAUDE_46),
    ("*claude-*-4-5-* *claude-4-5-*", replace(_CLAUDE_BUDGET, json_schema=True)),
    ("*claude-opus-4-* *claude-4-opus-* *claude-4-1-opus-*", replace(_CLAUDE_BUDGET, max_output=32 * _K)),
    ("*claude-sonnet-4-* *claude-4-sonnet-* *claude-3-7-*", _CLAUDE_BUDGET),
    ("*claude-3-5-*", replace(_CLAUDE, max_output=8_192)),
    ("*claude-3-* *claude-2-* *claude-instant-*", replace(_CLAUDE, max_output=4_096)),
    # A name newer than this table: what all current ones take.
    ("*claude-*", replace(_CLAUDE_ALWAYS, window=200 * _K, max_output=64 * _K)),
    ("gpt-6-*", replace(_GPT5_LONG, efforts=_LOW_TO_XHIGH)),
    ("gpt-5-*chat-*", _GPT_CHAT),
    ("gpt-5-pro-*", replace(_GPT5, efforts=("high",))),
    ("gpt-5-?-pro-*", replace(_GPT5, efforts=("medium", "high", "xhigh"))),
    ("gpt-5-4-mini-* gpt-5-4-nano-*", replace(_GPT5, efforts=("none", *_LOW_TO_XHIGH))),
    ("gpt-5-4-* gpt-5-5-* gpt-5-6-*", _GPT5_LONG),
    ("gpt-5-2-* gpt-5-3-*", replace(_GPT5, efforts=("none", *_LOW_TO_XHIGH))),
    ("gpt-5-1-codex-*", replace(_GPT5, efforts=_LOW_TO_HIGH)),
    ("gpt-5-1-*", replace(_GPT5, efforts=("none", *_LOW_TO_HIGH))),
    ("gpt-5-codex-*", replace(_GPT5, efforts=_LOW_TO_HIGH)),
    ("gpt-5-*", _GPT5),
    ("gpt-4-1-*", ModelFacts(1_047_576, 32_768)),
    ("gpt-4o-* chatgpt-4o-*", ModelFacts(128 * _K, 16_384)),
    ("gpt-4-turbo-* gpt-4-*-preview-*", ModelFacts(128 * _K, 4_096)),
    ("gpt-4-32k-*", ModelFacts(32_768, 4_096, images=False)),
    ("gpt-4-*", ModelFacts(8_192, 4_096, images=False)),
    ("gpt-3-5-*", ModelFacts(16_385, 4_096, images=False)),
    ("gpt-oss-*", replace(_OPEN_THINKING, efforts=_LOW_TO_HIGH)),
    ("o1-mini-* o1-preview-*", replace(_O_SERIES, window=128 * _K, max_output=32_768, images=False, efforts=())),
    ("o3-mini-*", replace(_O_SERIES, images=False)),
    ("o1-* o3-* o4-* codex-mini-*", _O_SERIES),
    ("gemini-3-*", replace(_GEMINI, call_extra=_UNSIGNED_CALL)),
    ("gemini-2-5-pro-*", _GEMINI),
    ("gemini-2-5-*", replace(_GEMINI, efforts=("none", *_LOW_TO_HIGH))),
    ("gemini-*", ModelFacts(1_048_576, 8_192)),
    ("gemma-3-* gemma3-* gemma-4-* gemma4-*", ModelFacts(131_072, 8_192)),
    ("gemma*", ModelFacts(8_192, 2_048, images=False)),
    ("grok-3-mini-*", replace(_GROK, window=131_072, images=False, efforts=("low", "high"))),
    ("grok-4-*fast* grok-4-1-*", replace(_GROK, window=2 * _M)),
    ("grok-4-*", _GROK),
    ("grok-*", ModelFacts(131_072, 16_384)),
    ("deepseek-v4-* deepseek-flash-*", replace(_DEEPSEEK, window=_M, max_output=65_536)),
    ("deepseek-reasoner-* deepseek-v3-2-*", replace(_DEEPSEEK, efforts=())),
    ("deepseek-r1-*", _OPEN_THINKING),
    ("deepseek-*", replace(_OPEN, reasoning_content="required")),
    (
        "kimi-k2-5-* kimi-k2-6-* kimi-k3-*",
        replace(_OPEN_THINKING, window=262_144, images=True, reasoning_content="required"),
    ),
    ("kimi-*", replace(_OPEN_THINKING, window=262_144, reasoning_content="required")),
    ("moonshot-*", replace(_OPEN, reasoning_content="required")),
    ("qwen*-vl-*", replace(_OPEN, images=True)),
    ("qwen3-coder-* qwen3-max-*", replace(_OPEN, window=262_144, max_output=65_536)),
    ("qwen3-5-* qwen3-6-* qwen3-7-*", replace(_OPEN_THINKING, window=262_144, images=True)),
    ("qwen3* qwq-* qwen-max-* qwen-plus-* qwen-turbo-*", _OPEN_THINKING),
    ("qwen*", replace(_OPEN, window=32_768)),
    ("llama-4-* llama4-*", ModelFacts(131_072, 8_192)),
    ("llama*-vision-*", ModelFacts(131_072, 8_192)),
    ("llama-3-1-* llama-3-2-* llama-3-3-* llama3-1-* llama3-2-* llama3-3-* llama-v3p*", _OPEN),
    ("meta-llama-3-1-* meta-llama-3-2-* meta-llama-3-3-*", _OPEN),
    ("llama3-* llama-3-* meta-llama-3-*", replace(_OPEN, window=8_192, max_output=4_096)),
    ("llama*", replace(_OPEN, window=4_096, max_output=2_048)),
    ("magistral-*", replace(_OPEN_THINKING, images=True)),
    ("codestral-* devstral-*", replace(_OPEN, window=262_144)),
    ("mistral-large-* mistral-medium-* mistral-small-* ministral-* pixtral-*", replace(_OPEN, images=True)),
    ("mixtral-* mistral-* open-mistral-* open-mixtral-*", replace(_OPEN, window=32_768)),
    ("glm-4-*v-*", replace(_OPEN_THINKING, images=True)),
    ("glm-4-6-* glm-4-7-* glm-5-*", replace(_OPEN_THINKING, window=200 * _K)),
    ("glm-*", _OPEN_THINKING),
    ("minimax-m*", replace(_OPEN_THINKING, window=196_608)),
    ("hermes-* deephermes-*", _OPEN),
    ("command-a-*", replace(_OPEN, window=256 * _K)),
    ("command-r* granite-* nemotron-* *-nemotron-* phi-3-* phi-4-mini-*", replace(_OPEN, window=128 * _K)),
    ("phi-*", replace(_OPEN, window=16_384, max_output=4_096)),
)
_COMPILED = tuple((re.compile(translate(glob)), facts) for globs, facts in _ROWS for glob in globs.split())
_SEPARATORS = str.maketrans(".:_@ ", "-----")


@lru_cache(maxsize=512)
def facts_for(model: str) -> ModelFacts:
    name = model.lower().rpartition("/")[2].translate(_SEPARATORS) + "-"
    return next((facts for pattern, facts in _COMPILED if pattern.match(name)), UNKNOWN)


@lru_cache(maxsize=512)
def capabilities_for(model: str, options: frozenset[str]) -> Capabilities:
    facts = facts_for(model)
    return replace(facts, options=options - facts.refused)


def nearest_effort(effort: str, offered: tuple[str, ...]) -> str | None:
    """The strongest supported effort that is not above the requested one, else the weakest; None if there is none."""
    if effort not in EFFORTS or not offered:
        return None
    rank = EFFORTS.index(effort)
    return max((e for e in offered if EFFORTS.index(e) <= rank), key=EFFORTS.index, default=offered[0])


# --- output and thinking in the messages protocol --------------------------------------------------------------------

_BUDGETS = {"minimal": 1_024, "low": 2_048, "": 8_192, "medium": 8_192, "high": 16_384, "xhigh": 32_768, "max": 49_152}
_BUDGET_MIN = 1_024


def output_limit(facts: ModelFacts, requested: int | None, route_limit: int | None, route_window: int | None) -> int:
    """The output limit this protocol requires. Unless one is requested it leaves three quarters of the window to the
    prompt."""
    if not requested:
        return route_limit or min(facts.max_output, (route_window or facts.window) // 4)
    return requested if facts is UNKNOWN else min(requested, route_limit or facts.max_output)


def adaptive_thinking(facts: ModelFacts, effort: str | None, forced: bool) -> JsonObject:
    """The fields for a model that decides how long it thinks; a forced call needs thinking off."""
    by_itself = facts.thinking_off != "omit"
    if (effort == "none" or forced) and facts.thinking_off != "never":
        return {"thinking": {"type": facts.thinking_off}} if by_itself else {}
    if effort is None and not by_itself:
        return {}
    # Newer models keep the text of their thinking to themselves unless asked.
    fields: JsonObject = {"thinking": {"type": "adaptive", "display": "summarized"}}
    if level := nearest_effort(effort or "", facts.efforts):
        fields["output_config"] = {"effort": level}
    return fields


def budgeted_thinking(facts: ModelFacts, effort: str | None, limit: int) -> tuple[int, JsonObject]:
    """The output limit, raised above the budget as far as the model allows, and the fields."""
    if facts.thinking != "budget" or effort in (None, "none"):
        return limit, {}
    budget = _BUDGETS.get(effort or "", _BUDGETS[""])
    if limit <= budget:
        limit = max(limit, min(facts.max_output, budget + limit))
    if limit <= budget:
        budget = limit - _BUDGET_MIN
    if budget < _BUDGET_MIN:
        return limit, {}
    return limit, {"thinking": {"type": "enabled", "budget_tokens": budget}}
