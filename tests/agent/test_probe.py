import json
from support.model_server import Call, Reply
from .house import tool
async def test_probe(house, server):
    house.offer(tool("look"))
    server.script=[Reply(reasoning="hm", text=["Hel","lo"], tool_calls=[Call("look", {"a":"x"})]), Reply(text="done")]
    ran = await house.run(server)
    for e in ran.events: print(json.dumps(e)[:400])
    print(json.dumps(ran.result, indent=1))
    print(json.dumps(server.requests[0].body)[:3000])
async def test_probe2(house, server):
    for p in ("chat","responses","anthropic"):
        server.script=[Reply(status=401, error="bad")]
        ran = await house.run(server, protocol=p)
        for e in ran.events: print(json.dumps(e)[:400])
        print(json.dumps(ran.result, indent=1))
