"""Imports every module that declares routes, and sorts the routes by group."""

from hermes.server import (  # noqa: F401  (imported for the routes they declare)
    admin_routes,
    chat,
    conversations,
    discovery,
    documents,
    jobs,
    mcp_routes,
    memory_routes,
    messages,
    metrics,
    model_setup_routes,
    ollama,
    responses,
    runs,
    session_chat,
    session_routes,
    sign_in,
    skill_routes,
    usage_routes,
    web_page,
    websocket,
)
from hermes.server.routes import GROUPS, ROUTES

__all__ = ["ROUTES"]

ROUTES.sort(key=lambda route: GROUPS.index(route.group))
