"""Ask pip-audit for known faults of the locked packages. Where its database cannot be reached, say so and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parent.parent / "requirements.lock"
# For one answer, and for all of them.
ANSWER_S, WHOLE_S = 3, 60


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--disable-pip", "--format", "json"]
    command += ["--progress-spinner", "off", "--timeout", str(ANSWER_S)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_S, check=False)
        found = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError):
        print("pip-audit: skipped, its database cannot be reached.")
        return 0
    faults = [(package, fault) for package in found for fault in package.get("vulns", ())]
    for package, fault in faults:
        fixed = ", ".join(fault.get("fix_versions") or ["no version yet"])
        print(f"pip-audit: {package['name']} {package['version']} has {fault['id']}, put right in {fixed}.")
    unknown = sum("skip_reason" in package for package in found)
    print(
        f"pip-audit: {len(found) - unknown} packages checked, {len(faults)} known faults, {unknown} not in its database."
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
