"""A server under mixed traffic for a long time: what it holds at the end is what it held at the beginning."""

import sys
from pathlib import Path

# The scripted model server and the server process are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
