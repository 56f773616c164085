"""A network of the test's own: names with scripted answers, and servers on loopback behind addresses of the world."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hermes.core.threads import Threads
from hermes.guards.network import Network

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
WORLD = "93.184.216.34"
WORLD_6 = "2606:2800:220:1::1"
ELSEWHERE = "198.41.0.4"


class Stage(Network):
    """`answers` are what a name stands for, one list per question, the last for all further ones.

    An address is reached where `servers` says; what was asked and dialled is written down.
    """

    def __init__(self, threads: Threads, **more: str | None) -> None:
        super().__init__(threads.submit, **more)
        self.answers: dict[str, list[list[str]]] = {}
        self.servers: dict[str, int] = {}
        self.requests: list[str] = []
        self.dialled: list[str] = []

    async def addresses(self, host: str, port: int) -> list[str]:
        self.requests.append(host)
        answers = self.answers.get(host)
        if answers is None:
            raise OSError(f"no such name: {host}")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def dial(self, address: str, port: int) -> tuple[str, int]:
        self.dialled.append(address)
        assert address in self.servers or address.startswith("127."), "a test stays on this machine"
        return ("127.0.0.1", self.servers[address]) if address in self.servers else (address, port)


@asynccontextmanager
async def serving(
    handler: Handler, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server that gives every request to one handler; its port."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls, reuse_address=True)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, str]:
    """A server's side of TLS for one name, and the file with which its clients verify it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.9"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / "certificate.pem", folder / "key.pem"
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    return context, str(public)
