"""`python scripts/modules.py`: write docs/modules.md, the first line of every module's docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/hermes"
TARGET = ROOT / "docs/modules.md"


def document() -> str:
    lines = [
        "# Modules",
        "",
        "Every module in a line, by package. Written by `python scripts/modules.py` from the docstrings.",
    ]
    folders = sorted({path.parent for path in SOURCE.rglob("*.py")})
    for folder in folders:
        name = folder.relative_to(SOURCE.parent).as_posix()
        lines += ["", f"## `{name}/`", "", "| module | contents |", "|---|---|"]
        lines += [f"| `{path.stem}` | {first_line(path)} |" for path in sorted(folder.glob("*.py"))]
    return "\n".join(lines) + "\n"


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(document(), "utf-8")
