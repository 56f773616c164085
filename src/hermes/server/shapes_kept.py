"""What answers look like, as types: runs and sessions. The API's description of them is made of these."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from hermes.server.shapes import Object, Usage

# --- runs ------------------------------------------------------------------------------------------------------------


class RunStarted(Struct, kw_only=True):
    """A run that was taken."""

    run_id: str
    status: Literal["started"]
    object: Literal["hermes.run"]
    session_id: str
    created_at: float


class Run(Struct, kw_only=True):
    """A run, as it stands."""

    object: Literal["hermes.run"]
    run_id: str
    kind: Literal["chat", "response", "session", "run", "job", "cli", "subagent"]
    status: Literal[
        "queued",
        "running",
        "waiting_for_approval",
        "waiting_for_input",
        "stopping",
        "completed",
        "failed",
        "cancelled",
    ]
    created_at: float
    started_at: float | None
    updated_at: float
    finished_at: float | None
    session_id: str
    response_id: str | None
    model: str | None
    last_event: str | None
    last_seq: int
    output: str | None
    completed: bool
    partial: bool
    interrupted: bool
    error: str | None
    error_code: str | None
    pending_approvals: list[Object]
    pending_question: Object | None
    usage: Usage
    metadata: Object


class Page(Struct, kw_only=True):
    """A page of a list."""

    object: Literal["list"]
    has_more: bool
    next_cursor: str | None
    total: int | None


class RunList(Page, kw_only=True):
    """Runs, the newest first."""

    data: list[Run]


class RunDeleted(Struct, kw_only=True):
    """A run that is gone."""

    object: Literal["hermes.run.deleted"]
    run_id: str
    deleted: bool


class RunStopping(Struct, kw_only=True):
    """A run that is being stopped."""

    run_id: str
    status: str


class Steered(Struct, kw_only=True):
    """Words that will reach the model."""

    run_id: str
    steer_id: str
    accepted: bool


class ApprovalAnswer(Struct, kw_only=True):
    """How many questions for leave were answered."""

    object: Literal["hermes.run.approval_response"]
    run_id: str
    choice: str
    resolved: int


class ClarifyAnswer(Struct, kw_only=True):
    """A question that was answered."""

    object: Literal["hermes.run.clarify_response"]
    run_id: str
    request_id: str


# --- jobs ------------------------------------------------------------------------------------------------------------


class Job(Struct, kw_only=True):
    """Scheduled work, and what came of it the last time."""

    id: str
    name: str
    prompt: str
    skills: list[str]
    model: str | None
    provider: str | None
    enabled_toolsets: list[str] | None
    workdir: str | None
    schedule: Object
    schedule_display: str
    repeat: Object
    enabled: bool
    state: Literal["scheduled", "paused", "completed", "failed"]
    created_at: float
    next_run_at: float | None
    last_run_at: float | None
    last_status: str | None
    last_error: str | None
    last_run_id: str | None
    session_id: str | None
    last_session_id: str | None
    deliver: Literal["local"]
    timezone: str
    origin: Object | None
    paused_at: float | None
    paused_reason: str | None
    script: str | None
    effort: str | None
    continuity: bool
    owner: str | UnsetType = UNSET


class JobKept(Struct, kw_only=True):
    """A job."""

    job: Job
    object: Literal["hermes.job"] | UnsetType = UNSET


class JobStarted(Struct, kw_only=True):
    """A job that runs now."""

    job: Job
    run_id: str


class JobDeleted(Struct, kw_only=True):
    """A job that is forgotten."""

    object: Literal["hermes.job.deleted"]
    id: str
    deleted: Literal[True]
    ok: Literal[True]


class JobList(Page, kw_only=True):
    """Jobs, under both names."""

    data: list[Job]
    jobs: list[Job]


# --- sessions --------------------------------------------------------------------------------------------------------


class Session(Struct, kw_only=True):
    """A session. Times are seconds since 1970."""

    id: str
    source: str | None
    user_id: str | None
    model: str | None
    title: str | None
    started_at: float
    ended_at: float | None
    end_reason: str | None
    message_count: int
    tool_call_count: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    estimated_cost_usd: None
    actual_cost_usd: float | None
    api_call_count: int
    parent_session_id: str | None
    forked_at_message_id: int | None
    has_system_prompt: bool
    has_model_config: bool
    archived: bool
    pinned: bool
    workdir: str | None
    toolsets: list[str] | None
    max_iterations: int | None
    last_active: float | None
    preview: str | None
    active_run_id: str | None


class SessionAnswer(Struct, kw_only=True):
    """One session."""

    object: Literal["hermes.session"]
    session: Session


class SessionList(Page, kw_only=True):
    """Sessions."""

    data: list[Session]
    limit: int
    offset: int


class SessionDeleted(Struct, kw_only=True):
    """A session that is gone."""

    object: Literal["hermes.session.deleted"]
    id: str
    deleted: bool


class SessionCompacted(Struct, kw_only=True):
    """What a compaction came to; the counts of tokens are missing where there was nothing to make shorter."""

    object: Literal["hermes.session.compaction"]
    session_id: str
    run_id: str
    compacted: bool
    messages_archived: int
    tokens_before: int | None
    tokens_after: int | None
    usage: Object


class StoredMessage(Struct, kw_only=True):
    """A message of a session."""

    id: int
    session_id: str
    role: str
    content: str | list[Any] | None
    tool_call_id: str | None
    tool_calls: list[Any] | None
    tool_name: str | None
    timestamp: float
    token_count: int | None
    finish_reason: str | None
    synthetic: bool
    run_id: str | None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    active: bool | UnsetType = UNSET
    compacted: bool | UnsetType = UNSET
    model_only: bool | UnsetType = UNSET


class MessageList(Struct, kw_only=True):
    """A page of a session's messages."""

    object: Literal["list"]
    session_id: str
    data: list[StoredMessage]
    has_more: bool
    first_id: int | None
    last_id: int | None
    total: int | None


class Match(Struct, kw_only=True):
    """A place where something was said."""

    object: Literal["hermes.session.match"]
    session_id: str
    title: str | None
    source: str | None
    message_id: int | None
    role: str | None
    timestamp: float | None
    snippet: str
    highlights: list[list[int]]
    score: float | None


class MatchList(Page, kw_only=True):
    """What a search found; not complete when its time was up."""

    data: list[Match]
    complete: bool


class Imported(Struct, kw_only=True):
    """What became of sessions that were sent in."""

    object: Literal["hermes.session.import"]
    imported: int
    skipped: int
    detached: int
    errors: list[Object]


class File(Struct, kw_only=True):
    """A file of a session."""

    id: str
    name: str
    bytes: int
    mime: str | None
    created_at: float
    direction: str


class FileList(Page, kw_only=True):
    """The files of a session."""

    data: list[File]


class SessionTurn(Struct, kw_only=True):
    """A turn of a session, at its end."""

    object: Literal["hermes.session.chat.completion"]
    session_id: str
    run_id: str
    message: Object
    usage: Usage
    completed: bool
    partial: bool
    interrupted: bool
    hermes: Object | UnsetType = UNSET
