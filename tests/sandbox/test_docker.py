"""Containers: what they are made with, how long they live, and who clears them away."""

import asyncio
import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hermes.core.processes import host_of, this_process
from hermes.sandbox import docker
from hermes.sandbox.base import SandboxError
from hermes.sandbox.docker import Docker
from hermes.sandbox.mounts import Place
from support.waiting import until

from .conftest import sh


def calls(folder: Path, verb: str) -> list[list[str]]:
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [call[1:] for call in map(json.loads, lines) if call[0] == verb]


def containers(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("hermes-*.json"))


def after(call: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(call) if name == option]


async def test_container_has_every_restriction(fake_docker: Path, place: Place, tmp_path: Path) -> None:
    (place.workspace / ".git/hooks").mkdir(parents=True)
    (place.workspace / ".git/config").touch()
    (place.workspace / ".env").touch()
    odd = tmp_path / 'odd, "name"'
    odd.mkdir()
    sandbox = Docker(replace(place, ro=(odd,), memory_mb=512, cpus=1.5), "some/image:1", "s1")
    await sh(sandbox, "true")
    (call,) = calls(fake_docker, "run")
    assert {"--detach", "--rm", "--init", "--read-only"} <= set(call)
    expected = {
        "--network": ["none"],
        "--cap-drop": ["ALL"],
        "--security-opt": ["no-new-privileges"],
        "--user": [f"{os.getuid()}:{os.getgid()}"],
        "--memory": ["512m"],
        "--memory-swap": ["512m"],
        "--cpus": ["1.5"],
        "--pids-limit": ["512"],
        "--tmpfs": ["/tmp:rw,exec,mode=1777,size=512m"],
        "--workdir": [str(place.workspace)],
    }
    assert {name: after(call, name) for name in expected} == expected
    work = place.workspace
    quoted = str(odd).replace('"', '""')
    assert after(call, "--mount") == [
        f"type=bind,source={place.private},target={place.private}",
        f"type=bind,source={work},target={work}",
        f"type=bind,source=/dev/null,target={work}/.env,readonly",
        f"type=bind,source={work}/.git,target={work}/.git",
        f"type=bind,source={work}/.git/config,target={work}/.git/config,readonly",
        f"type=bind,source={work}/.git/hooks,target={work}/.git/hooks,readonly",
        f"type=tmpfs,target={work}/scopes",
        f'type=bind,"source={quoted}","target={quoted}",readonly',
    ]
    labels = dict(label.split("=", 1) for label in after(call, "--label"))
    assert (labels["hermes.session"], labels["hermes.holder"]) == ("s1", this_process())
    assert call[call.index("--entrypoint") :][:3] == ["--entrypoint", "/bin/sh", "some/image:1"]
    await sandbox.stop()
    assert containers(fake_docker) == []


async def test_container_environment_is_private_to_command(fake_docker: Path, place: Place) -> None:
    sandbox = Docker(place, "image", "s1")
    env = {"PLAIN": "planted 'a' #b", "LINES": "x\ny", "LD_PRELOAD": "/evil.so"}
    result = await sh(sandbox, 'echo "$PLAIN|$LINES|$LD_PRELOAD|$DOCKER_CONFIG"', env=env)
    assert result.output.splitlines()[-2:] == ["planted 'a' #b|x", "y|/evil.so|"]
    assert "planted" not in (fake_docker / "calls").read_text()
    await sandbox.stop()


async def test_session_container_is_reused_until_mounts_change(fake_docker: Path, place: Place) -> None:
    sandbox = Docker(place, "image", "s1")
    await sh(sandbox, "true")
    await asyncio.gather(*(sh(sandbox, "true") for _ in range(5)))
    assert len(calls(fake_docker, "run")) == 1
    (place.workspace / ".vscode").mkdir()
    await sh(sandbox, "true")
    assert "target" in after(calls(fake_docker, "run")[-1], "--mount")[-2]
    assert len(calls(fake_docker, "run")) == 2
    await sh(sandbox, "true", network=True)
    assert after(calls(fake_docker, "run")[-1], "--network") == ["bridge"]
    assert len(containers(fake_docker)) == 1
    async with await sandbox.spawn(["sleep", "1000"], network=True) as process:
        await sh(sandbox, "true", network=False)
        assert len(containers(fake_docker)) == 2  # the other one is still in use
        process.kill()
    await sandbox.stop()
    assert containers(fake_docker) == []
    assert not [path for path in place.private.iterdir() if path.name.startswith(".")]


async def test_lost_container_is_recreated(fake_docker: Path, place: Place) -> None:
    sandbox = Docker(place, "image", "s1")
    await sh(sandbox, "true")
    subprocess.run(["docker", "rm", "--force", containers(fake_docker)[0]], check=True)
    assert (await sh(sandbox, "echo again")).output == "again\n"
    await sandbox.stop()


async def test_killing_one_command_keeps_others_in_container(fake_docker: Path, place: Place) -> None:
    sandbox = Docker(place, "image", "s1")
    waiting = "echo ready; until [ -e go ]; do sleep 0.01; done; echo done"
    first = await sandbox.spawn(["/bin/sh", "-c", "echo ready; sleep 1000"])
    second = await sandbox.spawn(["/bin/sh", "-c", waiting])
    async with first, second:
        for process in (first, second):
            assert await anext(process.chunks()) == b"ready\n"
        first.kill()
        assert await first.wait() == 137
        (place.workspace / "go").touch()
        assert b"".join([chunk async for chunk in second.chunks()]) == b"done\n"
        assert await second.wait() == 0
    assert len(calls(fake_docker, "run")) == 1
    await sandbox.stop()


async def test_idle_container_is_removed(fake_docker: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker.limits, "CONTAINER_IDLE_S_MAX", 0.0)
    sandbox = Docker(place, "image", "s1")
    await sh(sandbox, "true")
    await until(lambda: not containers(fake_docker))
    assert (await sh(sandbox, "echo again")).output == "again\n"
    await sandbox.stop()


async def test_sweep_removes_containers_of_dead_processes(fake_docker: Path, place: Place) -> None:
    host = host_of(this_process())
    mine, other = docker._home_label(place.home), "another home"
    cases = {
        "hermes-dead": (mine, f"{host}:999999999:1.00"),
        "hermes-live": (mine, this_process()),
        "hermes-away": (mine, "elsewhere:1:1.00"),
        "hermes-other": (other, f"{host}:999999999:1.00"),
    }
    for name, (home, holder) in cases.items():
        record = {"inner": 999999999, "outer": 0, "labels": {"hermes.home": home, "hermes.holder": holder}}
        (fake_docker / f"{name}.json").write_text(json.dumps(record))
    await docker.sweep(place.home)
    assert containers(fake_docker) == ["hermes-away", "hermes-live", "hermes-other"]


async def test_container_creation_failure(fake_docker: Path, place: Place) -> None:
    assert docker.probe.__wrapped__("image") == ""
    (fake_docker / "broken").touch()
    with pytest.raises(SandboxError, match="no such image"):
        await Docker(place, "image", "s1").spawn(["true"])
    assert "no such image" in docker.probe.__wrapped__("image")


async def test_real_container(place: Place) -> None:
    if failure := docker.probe.__wrapped__("python:3.12-slim"):
        pytest.skip(f"docker does not work here: {failure}")
    sandbox = Docker(place, "python:3.12-slim", "s1")
    try:
        result = await sh(sandbox, "echo x > made; cat made; id -u; touch /usr/x || echo refused")
        assert result.output.startswith(f"x\n{os.getuid()}\n")
        assert result.output.endswith("refused\n")
        assert (await sh(sandbox, "setsid sleep 1000 & sleep 1000", seconds=1)).code == 124
        assert (await sh(sandbox, "ls /proc | grep -c '^[0-9]'")).code == 0
    finally:
        await sandbox.stop()
