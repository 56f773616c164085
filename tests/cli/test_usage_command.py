"""`hermes usage`: what was used, by day, model and session."""

from __future__ import annotations

import json

from support.model_server import Reply

from .conftest import Cli


def test_usage_by_day_model_and_session(cli: Cli) -> None:
    cli.script(Reply(text="One."), Reply(text="Two."))
    assert cli.run("-z", "first").returncode == 0
    assert cli.run("-z", "second").returncode == 0
    total = {}
    for by in ("day", "model", "session"):
        result = cli.run("usage", "--by", by, "--json")
        assert result.returncode == 0
        document = json.loads(result.stdout)
        assert (document["by"], document["days"]) == (by, 30)
        assert len(document["data"]) == (2 if by == "session" else 1)
        total[by] = document["total"]["input_tokens"], document["total"]["output_tokens"], document["total"]["calls"]
        turns = [row["turns"] for row in document["data"]]
        assert turns == ([1, 1] if by == "session" else [2]) and document["total"]["turns"] == 2
    assert total["day"] == total["model"] == total["session"]
    assert total["day"][2] == 2 and min(total["day"]) > 0
    lines = cli.run("usage").stdout.splitlines()
    assert lines[0].split() == ["day", "turns", "calls", "input", "cached", "output", "cost"]
    assert lines[-1].startswith("total")
    assert "custom/m" in cli.run("usage", "--by", "model").stdout


def test_usage_counts_requests_for_titles(cli: Cli) -> None:
    assert cli.run("config", "unset", "auxiliary.title_generation.enabled").returncode == 0
    cli.script(
        Reply(text="One.", usage={"input": 100, "output": 10}),
        Reply(text="A title", usage={"input": 20, "output": 3}, continues=False),
    )
    assert cli.run("-z", "first").returncode == 0
    for by in ("day", "model", "session"):
        [row] = json.loads(cli.run("usage", "--by", by, "--json").stdout)["data"]
        assert (row["turns"], row["calls"], row["input_tokens"], row["output_tokens"]) == (1, 2, 120, 13)


def test_usage_of_nothing(cli: Cli) -> None:
    result = cli.run("usage")
    assert (result.returncode, result.stdout) == (0, "")
    assert "Nothing was used" in result.stderr
    assert json.loads(cli.run("usage", "--json").stdout)["data"] == []
    assert cli.run("usage", "--days", "0").returncode == 2
