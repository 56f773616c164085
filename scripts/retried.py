"""Print what `.ci/run` had to run twice, and fail where that is too much: see tests/known-flaky.txt."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

RETRIED_MAX = 3
KNOWN = Path(__file__).parent.parent / "tests/known-flaky.txt"


def retried(reports: Path) -> Iterator[tuple[str, str]]:
    """The tests of each suite that was run again, and the text of their first failure."""
    for retry in sorted(reports.glob("*/retry.xml")):
        for case in ElementTree.parse(retry.with_name("first.xml")).iter("testcase"):
            for fault in (*case.findall("failure"), *case.findall("error")):
                name = case.attrib["name"].partition("[")[0]
                yield (
                    f"{case.attrib['classname']}.{name}",
                    f"{case.attrib['name']}\n{fault.text or fault.get('message')}",
                )


def known() -> set[str]:
    """The tests on record, named as in the reports."""
    lines = [line.partition("#")[0].strip() for line in KNOWN.read_text().splitlines()]
    # The tests of the clients have a root folder of their own.
    return {
        line.replace(".py::", ".").replace("::", ".").replace("/", ".").removeprefix("tests.clients.")
        for line in lines
        if line
    }


def main() -> int:
    tests = list(retried(Path(sys.argv[1])))
    for name, text in tests:
        print(f"\nRetried: {name}: {text}")
    again = sorted({name for name, _ in tests} & known())
    for name in again:
        print(f"{name} is on record in tests/known-flaky.txt: mend its cause.")
    print(f"Retried tests: {len(tests)}, at most {RETRIED_MAX}.")
    return 1 if again or len(tests) > RETRIED_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
