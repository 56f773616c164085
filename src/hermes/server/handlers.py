"""Every module that declares routes, imported once; then the routes stand in the order of their groups."""

from hermes.server import (  # noqa: F401  (imported for the routes they declare)
    chat,
    conversations,
    discovery,
    documents,
    jobs,
    metrics,
    responses,
    runs,
    session_chat,
    session_routes,
    websocket,
)
from hermes.server.routes import GROUPS, ROUTES

__all__ = ["ROUTES"]

ROUTES.sort(key=lambda route: GROUPS.index(route.group))
