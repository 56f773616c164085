"""Faults of replicas, engines and the network between them; each is over, and recovered from, when its function returns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
from collections.abc import Awaitable, Callable

from hermes.cluster.engines import Engine
from support.gateway import CUT

from .cluster import ENGINES, TRY_S, Cluster, Json, Replica
from .links import Mode
from .load import Load

# After which time a replica must say what it cannot reach, and that it reaches it again.
NOTICED_S = 100.0
_CHECKS = {"postgresql": "state_db", "nats": "bus"}
_NAMES = {"postgresql": "PostgreSQL", "nats": "NATS"}


class Faults:
    """Draws faults. `log` says what was done, to be printed with a failure."""

    def __init__(self, cluster: Cluster, load: Load, chance: random.Random) -> None:
        self._cluster, self._load, self._chance = cluster, load, chance
        self.log: list[str] = []
        # kind: how often it is drawn, and what it does
        self._kinds: dict[str, tuple[int, Callable[[random.Random], Awaitable[None]]]] = {
            "replica killed": (20, self._kill),
            "replica stalled": (15, self._stall),
            "postgresql killed": (5, lambda chance: self._restart("postgresql", chance, kill=True)),
            "postgresql stopped": (4, lambda chance: self._restart("postgresql", chance, kill=False)),
            "nats killed": (7, lambda chance: self._restart("nats", chance, kill=True)),
            "nats emptied": (6, lambda chance: self._restart("nats", chance, kill=True, forget=True)),
            "network cut": (15, lambda chance: self._cut(chance, "cut")),
            "network silent": (8, lambda chance: self._cut(chance, "silent")),
            "network slow": (8, self._slow),
            "client leaves": (12, self._leave),
        }

    async def any(self, number: int) -> None:
        """One fault, after a moment."""
        chance = random.Random(self._chance.random())
        kind = chance.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])[0]
        await asyncio.sleep(chance.uniform(0, 2.0))
        started_at = asyncio.get_running_loop().time()
        await self._kinds[kind][1](chance)
        self.log.append(f"{number}: {kind}, {asyncio.get_running_loop().time() - started_at:.1f} s")

    def _replica(self, chance: random.Random) -> Replica:
        return chance.choice(self._cluster.replicas)

    async def _kill(self, chance: random.Random) -> None:
        replica = self._replica(chance)
        async with replica.fault:
            await replica.kill()
            await asyncio.sleep(chance.uniform(0, 1.5))
            async with self._cluster.engine_faults["postgresql"], self._cluster.engine_faults["nats"]:
                await replica.start()

    async def _stall(self, chance: random.Random) -> None:
        replica = self._replica(chance)
        async with replica.fault:
            replica.stall()
            await asyncio.sleep(chance.uniform(0.2, 3.0))
            replica.go_on()

    async def _leave(self, chance: random.Random) -> None:
        self._load.leave()

    async def _slow(self, chance: random.Random) -> None:
        replica, engine = self._replica(chance), chance.choice(ENGINES)
        async with replica.fault:
            replica.links[engine].set_slow(slow=True)
            await asyncio.sleep(chance.uniform(1.0, 3.0))
            replica.links[engine].set_slow(slow=False)

    async def _cut(self, chance: random.Random, mode: Mode) -> None:
        replica, engine = self._replica(chance), chance.choice(ENGINES)
        async with replica.fault, self._cluster.engine_faults[engine]:
            await replica.links[engine].set_mode(mode)
            try:
                await asyncio.sleep(chance.uniform(0.1, 1.5))
                if chance.random() < 0.5:
                    await says(self._cluster, replica, engine, away=True)
            finally:
                await replica.links[engine].set_mode("open")
            await says(self._cluster, replica, engine, away=False)

    async def _restart(self, name: str, chance: random.Random, *, kill: bool, forget: bool = False) -> None:
        cluster = self._cluster
        engine: Engine = cluster.postgres if name == "postgresql" else cluster.nats
        async with cluster.engine_faults[name]:
            await asyncio.to_thread(engine.kill if kill else engine.stop)
            if forget:
                shutil.rmtree(engine.folder / "jetstream", ignore_errors=True)
            await asyncio.sleep(chance.uniform(0.1, 2.0))
            replica = self._replica(chance)
            if chance.random() < 0.5 and not replica.fault.locked():
                async with replica.fault:
                    await says(cluster, replica, name, away=True)
            await asyncio.to_thread(engine.start)
            for replica in cluster.replicas:
                if not replica.fault.locked():
                    async with replica.fault:
                        await says(cluster, replica, name, away=False)


async def says(cluster: Cluster, replica: Replica, engine: str, *, away: bool) -> None:
    """Wait until a replica says that it is degraded for want of an engine, and of which; or that it is there."""
    payload: Json = {}
    try:
        async with asyncio.timeout(NOTICED_S):
            while True:
                with contextlib.suppress(*CUT, TimeoutError):
                    url = f"{replica.url}/health/ready"
                    async with asyncio.timeout(TRY_S), cluster.http.get(url) as response:
                        payload = json.loads(await response.read())
                    check = payload["readiness"]["checks"][_CHECKS[engine]]
                    if (check["status"] == "degraded") == away:
                        assert not away or (response.status == 503 and _NAMES[engine] in json.dumps(check)), check
                        return
                await asyncio.sleep(0.1)
    except TimeoutError:
        state = "away" if away else "back"
        raise AssertionError(f"{replica.name} does not notice that {engine} is {state}: {payload}") from None
