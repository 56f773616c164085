"""What the documentation says of settings, error codes and metrics is so."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hermes.core.failures import CODES, KINDS
from hermes.server.metrics import Metrics
from hermes.settings.keys import KEYS, at

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
_SECTIONS = {key.path[0] for key in KEYS}
_SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_*]+)+)(?:: [^`]*)?`")
# Names with a dot that are no settings: files, modules, and fields of events and of bodies.
_OTHERS = {"runs.first_events", "auxiliary.names_session"}
_ENDINGS = ("py", "md", "yaml", "json", "db", "svg", "service", "toml", "txt", "conf", "png", "gguf")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    named = {name for name in _SETTING.findall(page.read_text("utf-8")) if not name.endswith((*_ENDINGS, ".*"))}
    settings = {
        name for name in named if name.partition(".")[0] in _SECTIONS - {"model", "memory", "skills", "sessions"}
    }
    assert {name for name in settings if at(tuple(name.split("."))) is None} <= _OTHERS


def test_error_codes_are_explained() -> None:
    text = (REPOSITORY / "docs/troubleshooting.md").read_text("utf-8")
    codes = {*CODES, *(kind.code for kind in KINDS.values()), *(row.alone for row in CODES.values() if row.alone)}
    assert {code for code in codes if f"`{code}`" not in text} == set()


def test_dashboard_uses_metrics_that_exist() -> None:
    dashboard = json.loads((REPOSITORY / "deploy/grafana-dashboard.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert expressions
    names = {name for expression in expressions for name in re.findall(r"\bhermes_\w+", expression)}
    registry = Metrics()._registry
    known = {sample.name for metric in registry.collect() for sample in metric.samples}
    known |= {
        f"{metric.name}{ending}"
        for metric in registry.collect()
        for ending in ("", "_total", "_bucket", "_sum", "_count")
    }
    assert names - known == set()


def test_pictures_are_those_of_the_script() -> None:
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        from diagrams import DIAGRAMS, draw
    finally:
        sys.path.pop(0)
    for name, diagram in DIAGRAMS.items():
        assert (REPOSITORY / f"docs/images/{name}.svg").read_text("utf-8") == draw(diagram)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_named_in_place_of_a_snippet_exist(page: Path) -> None:
    reasons = re.findall(r"<!-- not run: ([^>]+) -->", page.read_text("utf-8"))
    named = [path for reason in reasons for path in re.findall(r"tests/[\w/]+(?:\.py)?", reason)]
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
