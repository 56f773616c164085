"""What `make eval-local` counts as made up, and that its checks let no invented answer pass."""

from __future__ import annotations

import re
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest
from evals import development, held_out
from evals.checks import Done, ends, invented, tells_date, tells_time, truthful


def evaluated(folder: Path, answer: str, *results: str, worked: str = "") -> Done:
    return Done("what is in notes.txt?", answer, folder, results=list(results), worked={*worked.split()})


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ("It is in secret.py.", "secret.py"),
        ("I changed the file.", "I changed"),
        ("The line has been added.", "has been added"),
        ("I will remind you.", "I will remind"),
        ("It is 23:59 now.", "23:59"),
        ("Nothing is in notes.txt.", ""),
        ("There is a.csv, as of 10:20.", ""),
        ("A.csv is there.", ""),
    ],
)
def test_claim_without_evidence_is_invented(tmp_path: Path, answer: str, what: str) -> None:
    (tmp_path / "a.csv").write_text("x\n")
    assert invented(evaluated(tmp_path, answer, "10:20")) == what


def test_completed_action_is_not_invented(tmp_path: Path) -> None:
    assert invented(evaluated(tmp_path, "I changed the file.", "ok", worked="patch")) == ""
    assert invented(evaluated(tmp_path, "I will remind you.", "ok", worked="patch")) == "I will remind"


def test_answer_without_result_does_not_pass(tmp_path: Path) -> None:
    now = datetime.now()
    assert ends("port")(evaluated(tmp_path, "The port is 1.", "port: 1"))
    assert not ends("port")(evaluated(tmp_path, "The port is 1."))
    assert tells_time(evaluated(tmp_path, f"It is {now:%H:%M}.", "x")) and not tells_time(
        evaluated(tmp_path, f"{now:%H:%M}")
    )
    assert not tells_time(evaluated(tmp_path, f"It is {now - timedelta(hours=5):%H:%M}.", "x"))


def test_date_is_recognized_in_any_format(tmp_path: Path) -> None:
    today = date.today()
    for form in ("%Y-%m-%d", "%A", "%B %-d", "%a %b %-d 10:20:00 UTC %Y", "%-d %B", "%-d. %b"):
        assert tells_date(evaluated(tmp_path, today.strftime(f"It is {form}.")))
    assert not tells_date(evaluated(tmp_path, f"It is {today - timedelta(days=1):%a %b %-d}."))


def test_refusal_names_what_is_missing(tmp_path: Path) -> None:
    check = truthful(r"\d+ ?°")
    assert check(evaluated(tmp_path, "I cannot know the weather.")) and check(evaluated(tmp_path, "There is no a.pdf."))
    assert not check(evaluated(tmp_path, "It is mild.")) and not check(evaluated(tmp_path, "I cannot say, but 20 °C."))


def test_held_out_requests_are_not_among_those_for_development() -> None:
    sizes = {kind: len(requests) for kind, requests in held_out.KINDS.items()}
    assert sizes == {"tools": 24, "loops": 12, "refusals": 8, "german": 8, "newcomer": 27}
    tuned_on = {_plain(request) for requests in development.KINDS.values() for request, _ in requests}
    assert not tuned_on & {_plain(request) for requests in held_out.KINDS.values() for request, _ in requests}
    assert not {*held_out.FILES} - {"README.md"} & {*development.FILES} - {"README.md"}


def _plain(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()
