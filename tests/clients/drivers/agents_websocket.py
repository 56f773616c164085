"""The package `openai-agents` with its model that speaks over a WebSocket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ApplyPatchTool,
    CustomTool,
    HostedMCPTool,
    LocalShellTool,
    ModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    RunConfig,
    Runner,
    ShellTool,
    WebSearchTool,
    function_tool,
    tool_namespace,
)
from agents.models.openai_responses import ResponsesWebSocketError
from websockets.exceptions import InvalidStatus

from clients.drivers import MODEL, PLAIN, Answer, How, Refused, weather
from clients.drivers.agents_sdk import AgentsTalk


class AgentsWebSocketTalk(AgentsTalk):
    """An agent whose model keeps a socket open for the time of a question."""

    def model(self, client: openai.AsyncOpenAI) -> Any:
        return OpenAIResponsesWSModel(MODEL, client)

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        try:
            return super().ask(prompt, how)
        except ResponsesWebSocketError as error:
            raise Refused(error.payload.get("status"), error.error_message or str(error)) from error
        except InvalidStatus as error:
            raise Refused(error.response.status_code, str(error)) from error


def run_with_tools(
    url: str, key: str, transport: str, shell: str, editor: Any, stream: bool, prompts: list[str]
) -> list[str]:
    """The answers of an agent that has a tool of every type; each prompt is chained to the one before."""
    return asyncio.run(_run_with_tools(url, key, transport, shell, editor, stream, prompts))


async def _run_with_tools(
    url: str, key: str, transport: str, shell: str, editor: Any, stream: bool, prompts: list[str]
) -> list[str]:
    async def shout(_: Any, text: str) -> str:
        return text.upper()

    shells = {
        "shell": ShellTool(lambda _: "ada"),
        "local_shell": LocalShellTool(lambda request: f"/home/ada: {request.data.action.command}"),
    }
    tools = [
        shells[shell],
        ApplyPatchTool(editor),
        CustomTool("shout", "Shouts.", shout),
        *tool_namespace(name="garden", description="The garden.", tools=[function_tool(weather)]),
        # These the server does not have.
        WebSearchTool(),
        HostedMCPTool({"type": "mcp", "server_label": "x", "server_url": "http://x.test", "require_approval": "never"}),
    ]
    stored = transport == "responses"
    answers, last = [], None
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        model = (OpenAIResponsesModel if stored else OpenAIResponsesWSModel)(MODEL, client)
        agent = Agent(name="tester", model=model, tools=tools, model_settings=ModelSettings(store=stored))
        for prompt in prompts:
            settings = {"run_config": RunConfig(tracing_disabled=True), "previous_response_id": last}
            settings["auto_previous_response_id"] = True
            if stream:
                result: Any = Runner.run_streamed(agent, prompt, **settings)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, prompt, **settings)
            last = result.last_response_id
            answers.append(result.final_output)
        await model.close()
    return answers
