"""The pictures of docs/concepts.md: boxes and arrows, written as SVG to docs/images/."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parents[1] / "docs/images"
_UNIT_X, _UNIT_Y, _BOX_W, _BOX_H = 210, 90, 148, 52


class Box(NamedTuple):
    x: float
    y: float
    text: str
    is_ours: bool = True


class Diagram(NamedTuple):
    title: str
    boxes: dict[str, Box]
    # from, to, label
    arrows: tuple[tuple[str, str, str], ...]


DIAGRAMS = {
    "run-log": Diagram(
        "Events are appended to the log of a run; every reader has a cursor of its own",
        {
            "model": Box(0, 0, "model", False),
            "tools": Box(0, 2, "tools", False),
            "loop": Box(1, 1, "turn loop"),
            "log": Box(2, 1, "log of the run\n1 2 3 4 5 …"),
            "live": Box(3, 0, "live stream"),
            "resumed": Box(3, 1, "resumed stream\nfrom event 3"),
            "store": Box(3, 2, "transcript"),
        },
        (
            ("model", "loop", ""),
            ("tools", "loop", ""),
            ("loop", "log", "append"),
            ("log", "live", ""),
            ("log", "resumed", ""),
            ("log", "store", ""),
        ),
    ),
    "session": Diagram(
        "A session holds messages; each turn is a run that adds to them; a fork begins another session",
        {
            "run1": Box(0, 0, "run 1"),
            "run2": Box(1, 0, "run 2"),
            "run3": Box(2, 0, "run 3\nwaits for its lease"),
            "session": Box(1, 1, "session\nmessages 1 … 8"),
            "fork": Box(2, 1, "fork at message 4\na session of its own"),
        },
        (("run1", "session", ""), ("run2", "session", ""), ("run3", "session", ""), ("session", "fork", "")),
    ),
    "tool-call": Diagram(
        "A tool call passes the guard, perhaps an approval, then runs in the sandbox",
        {
            "call": Box(0, 0, "tool call\nof the model", False),
            "guard": Box(1, 0, "guard\ncommand, path, URL"),
            "sandbox": Box(2, 0, "sandbox"),
            "result": Box(3, 0, "result on record\nthen to the model"),
            "ask": Box(1, 1, "approval\nby you"),
            "denied": Box(0, 1, "refusal\nwith the reason"),
        },
        (
            ("call", "guard", ""),
            ("guard", "sandbox", "allowed"),
            ("guard", "ask", "ask"),
            ("ask", "sandbox", "yes"),
            ("ask", "denied", "no"),
            ("sandbox", "result", ""),
        ),
    ),
    "recovery": Diagram(
        "A process dies; another finds the expired lease and goes on where the log ends",
        {
            "first": Box(0, 0, "process A\nlease, token 7", False),
            "second": Box(0, 1, "process B\nlease, token 8"),
            "log": Box(1.5, 0.5, "log of the run\n1 … 41 | 42 …"),
            "viewer": Box(3, 0.5, "viewer\nsees 1 … 42 …"),
        },
        (("first", "log", "dies after 41"), ("second", "log", "goes on"), ("log", "viewer", "")),
    ),
    "owners": Diagram(
        "Keys belong to owners; an owner sees only its own sessions, runs and jobs",
        {
            "k1": Box(0, 0, "key “tablet”\nchat, sessions", False),
            "k2": Box(0, 1, "key “ci”\nruns", False),
            "gate": Box(1, 0.5, "gate\nkey, scopes, rates"),
            "o1": Box(2.2, 0, "sessions, runs, jobs\nof tablet"),
            "o2": Box(2.2, 1, "sessions, runs, jobs\nof ci"),
        },
        (("k1", "gate", ""), ("k2", "gate", ""), ("gate", "o1", ""), ("gate", "o2", "")),
    ),
    "replicas": Diagram(
        "Replicas share PostgreSQL and NATS; any of them answers any request",
        {
            "clients": Box(0, 1, "clients", False),
            "a": Box(1.2, 0, "replica"),
            "b": Box(1.2, 1, "replica"),
            "c": Box(1.2, 2, "replica"),
            "postgres": Box(2.6, 0.4, "PostgreSQL\nwhat is kept", False),
            "nats": Box(2.6, 1.6, "NATS JetStream\nlive events, queue", False),
        },
        (
            ("clients", "a", ""),
            ("clients", "b", ""),
            ("clients", "c", ""),
            *((one, engine, "") for one in "abc" for engine in ("postgres", "nats")),
        ),
    ),
}


def draw(diagram: Diagram) -> str:
    width = int(max(box.x for box in diagram.boxes.values()) * _UNIT_X + _BOX_W + 8)
    height = int(max(box.y for box in diagram.boxes.values()) * _UNIT_Y + _BOX_H + 8)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif" '
        f'font-size="13" role="img"><title>{escape(diagram.title)}</title>'
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#78909c"/></marker></defs>'
    ]
    for start, end, label in diagram.arrows:
        (x1, y1), (x2, y2) = _edges(diagram.boxes[start], diagram.boxes[end])
        parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#78909c" stroke-width="1.5" marker-end="url(#end)"/>'
        )
        if label:
            parts.append(
                f'<text x="{(x1 + x2) / 2:g}" y="{(y1 + y2) / 2 - 5:g}" text-anchor="middle" fill="#78909c" font-size="11">'
                f"{escape(label)}</text>"
            )
    for box in diagram.boxes.values():
        x, y = _corner(box)
        fill, text = ("#00796b", "#fff") if box.is_ours else ("#eceff1", "#263238")
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{_BOX_W}" height="{_BOX_H}" rx="6" fill="{fill}"/>')
        lines = box.text.split("\n")
        for index, line in enumerate(lines):
            baseline = y + _BOX_H / 2 + 5 + (index - (len(lines) - 1) / 2) * 17
            parts.append(
                f'<text x="{x + _BOX_W / 2:g}" y="{baseline:g}" text-anchor="middle" fill="{text}">{escape(line)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _corner(box: Box) -> tuple[float, float]:
    return box.x * _UNIT_X + 4, box.y * _UNIT_Y + 4


def _edges(start: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves one box and meets the other: at their sides, or above and below where they share a column."""
    (x1, y1), (x2, y2) = _corner(start), _corner(end)
    if start.x == end.x:
        down = end.y > start.y
        return (x1 + _BOX_W / 2, y1 + _BOX_H * down), (x2 + _BOX_W / 2, y2 + _BOX_H * (not down))
    right = end.x > start.x
    return (x1 + _BOX_W * right, y1 + _BOX_H / 2), (x2 + _BOX_W * (not right), y2 + _BOX_H / 2)


if __name__ == "__main__":
    for name, diagram in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(draw(diagram), "utf-8")
