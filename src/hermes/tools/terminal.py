"""The tool `terminal`: commands in the sandbox of the session, in a shell that keeps its state."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from hermes.core import limits
from hermes.core.errors import HermesError
from hermes.core.ids import folder_name
from hermes.guards.commands import detaches, simple_forms
from hermes.guards.read_only import is_read_only
from hermes.guards.rules import NETWORK
from hermes.sandbox.base import Ended, Process, Sandbox
from hermes.sandbox.choose import shell_in, why_no_commands
from hermes.sandbox.local import INSTALL, NoSandbox
from hermes.sandbox.proxy import PROXIED
from hermes.sandbox.shell import Shell
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef, ToolError
from hermes.tools.framework.result_limits import answer_chars_max
from hermes.tools.output_buffer import CapturedOutput, Spill

_IN_BACKGROUND = "Start what is to go on running with background=true, without &, nohup, setsid or disown."
# What would make a later command run more than is visible.
_HIJACKING_VARIABLES = re.compile(
    r"BASH_FUNC_|(?:BASH_ENV|BASHOPTS|ENV|LD_AUDIT|LD_PRELOAD|PROMPT_COMMAND|PS4|SHELLOPTS)\Z"
)
# The turn that a command works for. These only identify; they give no access.
SESSION_ID, SESSION_KEY, PLATFORM = "HERMES_SESSION_ID", "HERMES_SESSION_KEY", "HERMES_PLATFORM"
_LONGER = "Give it more time, or start it with background=true."
_SUDO = 'sudo() { command sudo -n "$@"; }\n'
_OFFLINE = "Commands have no network here; the user can allow it: hermes config set terminal.network true."
_PROXIED = (
    "It did not use the proxy. Commands reach the network over HTTP and HTTPS only, through the proxy that the variables "
    "http_proxy and https_proxy name; the user is then asked to allow the host. Use an https:// address in place of ssh "
    "or git://, and tell programs that do not read these variables to use the proxy."
)
# How programs report that they have no network.
_UNREACHABLE = re.compile(
    r"could not resolve|name resolution|name or service not known|getaddrinfo|ENOTFOUND|EAI_AGAIN|network is unreachable|"
    r"no address associated|failed to lookup address|dns error|no such host|unknownhostexception|connect to host",
    re.IGNORECASE,
)
# How a command ended: the status, and its explanation.
ENDED: dict[Ended, tuple[str, str]] = {
    "exit": ("ok", ""),
    "timeout": ("timeout", "It took longer than {seconds:g} s and was ended; this is what it had said by then."),
    "interrupted": ("interrupted", "It was stopped; this is what it had said by then."),
    "killed": ("interrupted", "It was ended from outside."),
}
# Commands that use the network: these, and some subcommands of others.
_VERBS = {
    "git": "clone fetch pull push ls-remote",
    "pip pip3 gem": "install download",
    "npm pnpm yarn uv cargo go": "install i ci add update fetch get sync lock pip tool",
    "apt apt-get": "install update",
}
_ONLINE = dict.fromkeys((NETWORK | {"npx"}) - {"openssl", "rsync"}, "")
_ONLINE |= {name: verbs for names, verbs in _VERBS.items() for name in names.split()}
_WRAPPERS = frozenset({"sudo", "env", "command", "nice", "nohup", "timeout", "time", "xargs", "exec"})


class Terminal(ToolArguments):
    command: Annotated[str, Meta(min_length=1, max_length=limits.COMMAND_CHARS_MAX)]
    background: Annotated[bool, Meta(description="Start it and return at once.")] = False
    timeout: Annotated[float, Meta(gt=0, description="seconds; 180 if not given")] | None = None
    workdir: Annotated[str, Meta(description="Where to run it; else where the last one ended.")] = ""
    notify_on_complete: Annotated[bool, Meta(description="Tell you when the background process ends.")] = False
    keep: Annotated[bool, Meta(description="Let the background process go on when the user stops the turn.")] = False


@dataclass(frozen=True, slots=True)
class Plan:
    sandbox: Sandbox
    shell: Shell
    text: str
    seconds: float | None
    foreign: bool


async def sandbox_and_shell(ctx: ToolContext) -> tuple[Sandbox, Shell]:
    try:
        sandbox = await ctx.resources.sandbox()
    except HermesError as error:
        raise ToolError(f"No command can be run: {error}", "tool_unavailable", "Tell the user.") from None
    if isinstance(sandbox, NoSandbox):
        raise ToolError("No command can be run.", "tool_unavailable", f"Tell the user: {INSTALL}.")
    session = ctx.resources.session
    if session.shell is None:
        session.shell = await ctx.blocking(partial(shell_in, sandbox))
    return sandbox, session.shell


def environment(ctx: ToolContext, shell: Shell) -> dict[str, str]:
    inherited = {name: value for name, value in shell.env.items() if name != SESSION_KEY}
    key = {} if ctx.session_key is None else {SESSION_KEY: ctx.session_key}
    return {**inherited, SESSION_ID: ctx.session_id, PLATFORM: ctx.resources.spec.source, **key}


async def _prepare(ctx: ToolContext, args: Terminal) -> Prepared:
    command, background = args.command, args.background
    seconds_max, seconds = ctx.settings.terminal.max_timeout, args.timeout
    if seconds is None and not background:
        seconds = min(seconds_max, ctx.settings.terminal.timeout)
    if seconds is not None and seconds > seconds_max and not background:
        raise ToolError(f"A command may take {seconds_max:g} s.", "invalid_arguments", _IN_BACKGROUND)
    if await ctx.blocking(partial(detaches, command)):
        raise ToolError("The command leaves something running behind it.", "invalid_arguments", _IN_BACKGROUND)
    sandbox, shell = await sandbox_and_shell(ctx)
    if background and not ctx.resources.processes.make_room(ctx.owner):
        message = f"{limits.BACKGROUND_MAX} of your processes run already."
        raise ToolError(message, "limit_reached", "End one of them with process.")
    cwd = _resolve_path(args.workdir, shell)
    try:
        await approvals.command(ctx, command, cwd)
    except approvals.Blocked as refusal:
        refusal.answer = {"output": "", "exit_code": -1, **refusal.answer}
        raise
    foreign = await ctx.blocking(partial(_is_foreign, ctx, sandbox, command, background=background))
    text = f"cd -- {shlex.quote(cwd)} || exit\n{command}" if cwd != shell.cwd else command
    return Prepared(value=Plan(sandbox, shell, _SUDO * ("sudo" in command) + text, seconds, foreign))


def _is_foreign(ctx: ToolContext, sandbox: Sandbox, command: str, *, background: bool) -> bool:
    """Whether the output may come from outside: from the network, or from a file that did. For a sandboxed foreground
    command the proxy knows when it has ended; without a sandbox the names of the commands decide."""
    if sandbox.isolated:
        proxied = sandbox.name in PROXIED and not background
        online = approvals.online(ctx, sandbox) and not proxied and not is_read_only(command)
    else:
        online = goes_online(command)
    return online or ctx.resources.names_foreign_file(command)


def _resolve_path(path: str, shell: Shell) -> str:
    home = shell.env.get("HOME", "/")
    return os.path.normpath(os.path.join(shell.cwd, re.sub(r"\A~(?=/|\Z)", lambda _: home, path)))


def goes_online(command: str) -> bool:
    """Whether a command line has a simple command that needs the network, guessed by name."""
    for form in simple_forms(command):
        operands = [word for word in form.split() if not word.startswith("-") and "=" not in word]
        while operands and (operands[0] in _WRAPPERS or operands[0].isdigit()):
            del operands[0]
        verbs = _ONLINE.get(os.path.basename(operands[0])) if operands else None
        if verbs is not None and (not verbs or set(operands[1:3]) & set(verbs.split())):
            return True
    return False


async def _run(ctx: ToolContext, args: Terminal) -> Answer:
    plan: Plan = ctx.prepared
    ctx.foreign, shell, started_at = plan.foreign, plan.shell, time.monotonic()
    try:
        argv = await ctx.blocking(partial(shell.argv, plan.text, remember=not args.background))
        async with ctx.resources.session.hosts.call(ctx) as call:
            env, call_id = environment(ctx, shell), "" if args.background else ctx.call_id
            starting = plan.sandbox.spawn(argv, env=env, seconds=plan.seconds, call_id=call_id)
            process, stopped = await start_process(starting)
            if args.background and not stopped:
                options = {"notify": args.notify_on_complete, "keep": args.keep}
                background = ctx.resources.processes.add(ctx, args.command, process, plan.sandbox, **options)
                background.foreign, ctx.foreign = plan.foreign, False  # its output is not in this answer
                return {"status": "started", "session_id": background.id, "pid": process.pid, "cwd": shell.cwd}
            spill = Spill(ctx.resources.spill / f"{folder_name(ctx.call_id)}-output.txt", ctx.blocking, ctx.redact)
            chars_max = min(ctx.settings.tool_output.max_bytes, output_chars_max(ctx))
            captured = CapturedOutput(chars_max, ctx.secrets, ctx.emit, spill=spill)
            code = await follow_process(process, captured)
        ctx.foreign = ctx.foreign or call.connected
    except HermesError as fault:
        raise ToolError(f"The command could not be started: {fault}", "tool_unavailable", "Tell the user.") from None
    finally:
        await run_to_end(ctx.blocking(shell.keep))
        shell.env = {name: value for name, value in shell.env.items() if not _HIJACKING_VARIABLES.match(name)}
    status, error = ENDED[process.ended_by]
    answer: Answer = {"output": captured.text(), "exit_code": code, "status": status, "cwd": shell.cwd}
    answer |= {"duration_ms": round((time.monotonic() - started_at) * 1000), "truncated": captured.ends.cut > 0}
    answer["spill"] = str(spill.path) if spill.started else None
    answer |= await approvals.set_aside(ctx, plan.sandbox, ask=status == "ok")
    if status != "ok":
        hint = answer.pop("hint", "") or (_LONGER if status == "timeout" else "")
        raise ToolError(process.reason or error.format(seconds=plan.seconds), status, hint, **answer)
    answer["error"] = None
    if code and (hint := call.hint or await ctx.blocking(partial(_network_hint, plan.sandbox, answer["output"]))):
        answer["hint"] = hint
    return answer


def _network_hint(sandbox: Sandbox, output: str) -> str:
    """A hint for a command whose output says that it has no network; empty for other failures."""
    proxied = sandbox.name in PROXIED
    if not sandbox.isolated or (sandbox.place.network and not proxied) or not _UNREACHABLE.search(output):
        return ""
    return _PROXIED if proxied else _OFFLINE


def output_chars_max(ctx: ToolContext) -> int:
    """How long output may be so that the answer is not truncated again."""
    return answer_chars_max(ctx.settings.tool_output.max_chars, ctx.resources.window_tokens) * 3 // 4


async def start_process(starting: Awaitable[Process]) -> tuple[Process, bool]:
    """The process once it has started, and whether the caller was cancelled meanwhile: then it is killed at once."""
    task, stops = asyncio.ensure_future(starting), list[bool]()
    await run_to_end(task, lambda: stops.append(True))
    process = task.result()
    if stops:
        process.interrupt()
        process.kill()
    return process, bool(stops)


async def follow_process(
    process: Process, captured: CapturedOutput, cancelled: Callable[[], object] = lambda: None
) -> int:
    """The exit code, once all output is read. When the caller is cancelled meanwhile, the command is interrupted."""

    async def read() -> None:
        async for data in process.chunks():
            await captured.add(data)
        await captured.add(b"", end=True)

    def stop() -> None:
        process.interrupt()
        cancelled()

    async with process:
        await run_to_end(read(), stop)
        return await process.wait()


async def run_to_end(work: Awaitable[Any], cancelled: Callable[[], object] = lambda: None) -> None:
    """Wait for work that must not be left half done; `cancelled` is called at each cancellation of the caller."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled()
    task.result()


TOOL = ToolDef(
    name="terminal",
    toolset="terminal",
    description=(
        "Run a shell command. Working directory and exported variables are kept for the next one. Output and errors "
        "come back together; there is no input, so use flags that answer questions. For servers and long work use "
        "background=true, then the tool process."
    ),
    arguments=Terminal,
    run=_run,
    prepare=_prepare,
    scope=lambda _: frozenset({"shell"}),
    timeout_s=None,
    available=why_no_commands,
    preview=lambda args: args.command,
)
