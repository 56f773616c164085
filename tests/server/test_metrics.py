"""What `/metrics` tells."""
from .conftest import Api
from support.model_server import Reply

async def test_x(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    await api.ask("hi")
    async with api.get("/nothing/here") as r: pass
    async with api.post("/v1/chat/completions", {}) as r: pass
    async with api.get("/metrics") as r:
        print(r.headers)
        print(await r.text())
