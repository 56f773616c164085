"""Between the check and the use: links that a command swaps all the time lead no tool astray."""

from __future__ import annotations

from agent.conftest import MakeHarness
from support.model_server import Call, ModelServer
from support.waiting import until
from tools.commanding import ToolSession

from .attempting import TOOLS
from .canaries import Canaries

# A folder that is now a real one and now a link to outside; the same for a file.
SWAPPING = """
mkdir -p real; echo inside > real/secret; ln -sfn {out} link; ln -sfn {out}/secret one
while :; do
  mv -T real d; mv -T d real; mv -T link d; mv -T d link
  cp real/secret two; mv -T two file; cp -P one three; mv -T three file
done
"""
# So many, and more of them until both states of the links were met.
ROUNDS, ROUNDS_MAX = 12, 100


async def test_swapped_links_do_not_mislead_tools(
    make_harness: MakeHarness, server: ModelServer, canaries: Canaries
) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap", approvals={"mode": "off"})
    tool_session.offer(*TOOLS)
    canaries.plant()
    swapping = SWAPPING.format(out=canaries.out)
    started = await tool_session.call("terminal", {"command": swapping, "background": True})
    assert started["status"] == "started"
    await until((canaries.workspace / "file").is_symlink)
    # Whoever just follows it is there.
    assert (canaries.workspace / "one").read_text() == (canaries.out / "secret").read_text()
    text = ""
    for number in range(ROUNDS_MAX):
        if number >= ROUNDS and "path_refused" in text and ("inside" in text or "path_not_found" in text):
            break
        run = await tool_session.run(
            *(
                Call("read_file", {"path": path, "offset": 1 + copy})
                for path in ("d/secret", "file")
                for copy in range(4)
            ),
            Call("search_files", {"pattern": "canary", "path": "."}),
            Call("search_files", {"pattern": "canary", "path": "file"}),
            Call("write_file", {"path": f"d/new{number}", "content": "x", "overwrite": True}),
            Call("write_file", {"path": "file", "content": "x", "overwrite": True}),
            Call("vision_analyze", {"image_url": "d/secret", "question": "?"}),
        )
        text += "".join(m["content"] for m in run.result["messages"] if m["role"] == "tool")
    await tool_session.call("process", {"action": "kill", "session_id": started["session_id"]})
    assert canaries.touched(text) == set()
    assert "path_refused" in text and ("inside" in text or "path_not_found" in text)
