"""Images by address: from a named host they are shown as if they had been sent, and nothing else
is asked for."""

from __future__ import annotations

import base64
import ssl
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic

from tests.gateway.test_image_turns import sizes
from tests.gateways import MODEL, World, gateway
from tests.pictures import picture, seeing_renderer, url_of
from tinker_claw.config.load import load
from tinker_claw.errors import ConfigError, RequestError
from tinker_claw.gateway.fetch import MOST_FETCHED, fetch
from tinker_claw.images import MOST_BYTES, AwayError, fetched, read_url
from tinker_claw.render.renderer import Renderer

FILE = picture(96, 64)
AT = "messages[0].content[0].image_url.url"
GLOBAL = "93.184.215.14"


class Host:
    """An HTTP server of images, and of what is none."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        outer, self.asked = self, list[tuple[str, dict[str, str]]]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                if self.path == "/late.png":
                    time.sleep(0.5)
                sent = {"content-type": "image/png", "content-length": str(len(FILE))}
                status, more = outer.answers.get(self.path, (200, {}))
                self.send_response(status)
                for name, value in (sent | more).items():
                    self.send_header(name, value)
                with suppress(OSError):  # nobody reads on
                    self.end_headers()
                    self.wfile.write(FILE)
                    while self.path == "/endless.png" and outer.sent < 10 * MOST_BYTES:
                        outer.sent += self.wfile.write(bytes(100_000))

            def log_message(self, format: str, *args: Any) -> None: ...

        self.sent = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.name = f"127.0.0.1:{self.server.server_port}"
        self.answers: dict[str, tuple[int, dict[str, str]]] = {
            "/moved.png": (302, {"location": f"http://{self.name}/ok.png"}),
            "/none.png": (404, {}),
            "/page": (200, {"content-type": "text/html"}),
            "/drawn.svg": (200, {"content-type": "image/svg+xml"}),
            "/packed.png": (200, {"content-encoding": "gzip"}),
            "/endless.png": (200, {"content-length": str(10 * MOST_BYTES)}),
            "/broken.png": (200, {"content-length": str(2 * len(FILE))}),
        }


@contextmanager
def host(tls: ssl.SSLContext | None = None) -> Iterator[Host]:
    made = Host(tls)
    thread = Thread(target=made.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return seeing_renderer(tmp_path_factory.mktemp("seeing"))


def at(url: str, *words: str) -> dict[str, Any]:
    """A user's message in chat completions: an image by address, and words."""
    texts = [{"type": "text", "text": text} for text in words]
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, *texts]}


async def test_an_image_of_a_named_host_is_shown_over_every_wire(
    tmp_path: Path, seeing: Renderer
) -> None:
    with host() as there:
        url = f"http://{there.name}/ok.png"
        async with gateway(tmp_path, seeing, sees=True, image_hosts=there.name) as world:
            said: Any = [at(url, "What is it?")]
            await world.openai.chat.completions.create(model=MODEL, messages=said)
            result = {"type": "function_call_output", "call_id": "c"}
            given: Any = [
                {"role": "user", "content": "Look"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                result | {"output": [{"type": "input_image", "image_url": url}]},
            ]
            await world.openai.responses.create(model=MODEL, input=given)
            source = {"type": "image", "source": {"type": "url", "url": url}}
            block: Any = [{"role": "user", "content": [source, source]}]
            async with AsyncAnthropic(
                base_url=world.url.removesuffix("/v1"), api_key="any", max_retries=0
            ) as client:
                await client.messages.create(model=MODEL, max_tokens=50, messages=block)
            assert sizes(world.sampler) == [(96, 64, "png")] * 2
            images = [one.data for params in world.sampler.params for one in params.images]
            assert len(set(images)) == 1
            assert len(images) == 4
            # Sent as data it is the same prompt.
            await world.ask(at(url_of(FILE), "What is it?"))
            assert world.sampler.prompts[-1] == world.sampler.prompts[0]
        assert [path for path, _ in there.asked] == ["/ok.png"] * 3, "once a request"
        assert {headers["host"] for _, headers in there.asked} == {there.name}
        assert not any(
            "cookie" in headers or "authorization" in headers for _, headers in there.asked
        )


async def refused(world: World, url: str) -> str:
    response = await world.ask(at(url))
    assert response.status_code == 400, response.text
    assert world.sampler.prompts == []
    error = response.json()["error"]
    assert error["param"] == AT
    return error["message"]


async def test_whatever_is_not_an_image_of_a_named_host_is_a_clear_error(
    tmp_path: Path, seeing: Renderer
) -> None:
    with host() as there, host() as other:
        async with gateway(
            tmp_path, seeing, sees=True, image_hosts=f"{there.name}, images.example.org"
        ) as world:
            for url, why in (
                (f"http://{other.name}/ok.png", "nothing is fetched here"),
                (f"http://{there.name}.example.org/ok.png", "nothing is fetched here"),
                (f"http://me:secret@{there.name}/ok.png", "nothing is fetched here"),
                ("http://images.example.org/ok.png", "only https is asked"),
                ("https://[::1/ok.png", "nothing is fetched here"),
            ):
                assert why in await refused(world, url), url
            assert other.asked == there.asked == []
            for path, why in {
                "/moved.png": "redirects, which is not followed",
                "/none.png": "its host answers 404",
                "/page": "not a plain image that is read here: 'text/html'",
                "/drawn.svg": "not a plain image that is read here: 'image/svg+xml'",
                "/packed.png": "not a plain image that is read here",
                "/endless.png": "more than the 10,000,000 bytes left for it",
                "/broken.png": "could not be fetched",
            }.items():
                assert why in await refused(world, f"http://{there.name}{path}"), path
            assert len(there.asked) == 7, "no redirect was followed"
            assert there.sent < 3 * MOST_BYTES
            urls = [f"http://{there.name}/{n}.png" for n in range(MOST_FETCHED + 1)]
            response = await world.ask(
                {"role": "user", "content": [at(url)["content"][0] for url in urls]}
            )
            assert response.status_code == 400
            assert f"more than {MOST_FETCHED} images by address" in response.text
            assert len(there.asked) == 7 + MOST_FETCHED


async def test_nothing_is_fetched_unless_a_host_is_named_and_the_model_sees(
    tmp_path: Path, seeing: Renderer, renderer: Renderer
) -> None:
    with host() as there:
        url, named = f"http://{there.name}/ok.png", {"image_hosts": there.name}
        async with gateway(tmp_path / "a", seeing, sees=True) as world:
            assert "--image-hosts" in await refused(world, url)
        async with gateway(tmp_path / "b", seeing, sees=True, images="off", **named) as world:
            assert "--images off" in await refused(world, url)
        async with gateway(tmp_path / "c", renderer, sees=True, **named) as world:
            assert "demo reads text only" in await refused(world, url)
        assert there.asked == []


async def test_what_one_request_may_hold_counts_what_is_fetched(
    tmp_path: Path, seeing: Renderer
) -> None:
    with host() as there:
        url = f"http://{there.name}/ok.png"
        async with gateway(
            tmp_path, seeing, sees=True, image_hosts=there.name, max_held_bytes=len(FILE) + 100
        ) as world:
            response = await world.ask(at(url))
            assert response.status_code == 429
            assert "would be held" in response.text


async def test_a_host_that_is_slow_is_left() -> None:
    with host() as there:
        away = AwayError(AT, f"http://{there.name}/late.png")
        with pytest.raises(RequestError, match=r"did not come within 0\.1 seconds"):
            await fetch(away, [there.name], MOST_BYTES, seconds=0.1)


async def resolved(host: str, port: int, *, to: Collection[str]) -> Collection[str]:
    return to


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.1"], ["127.0.0.1"], ["169.254.169.254"], ["100.64.0.1"], ["0.0.0.0"],
        ["224.0.0.1"], ["::ffff:127.0.0.1"], ["fd00::1"], [GLOBAL, "192.168.1.1"], [],
    ],
)  # fmt: skip
async def test_a_name_that_leads_into_a_network_is_not_asked(addresses: list[str]) -> None:
    def asked(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    for name in ("images.example.org", "2130706433"):
        with pytest.raises(RequestError, match="inside a network") as raised:
            await fetch(
                AwayError(AT, f"https://{name}/ok.png"),
                [name],
                MOST_BYTES,
                resolve=partial(resolved, to=addresses),
                transport=httpx.MockTransport(asked),
            )
        assert raised.value.param == AT


class Led(httpx.AsyncHTTPTransport):
    """The way to a server of this machine, for requests to an address out in the internet."""

    def __init__(self, port: int, trusts: Path) -> None:
        super().__init__(verify=ssl.create_default_context(cafile=str(trusts)))
        self._port = port
        self.asked = list[str]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return await super().handle_async_request(request)


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for images.example.org, and a server's context that shows it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
    made += "-subj /CN=x -addext subjectAltName=DNS:images.example.org"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made.split(), *files], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return certificate, tls


async def test_the_very_address_that_was_checked_is_asked_and_must_prove_its_name(
    certified: tuple[Path, ssl.SSLContext],
) -> None:
    certificate, tls = certified
    with host(tls) as there:
        for name, proven in (("images.example.org", True), ("others.example.org", False)):
            away = AwayError(AT, f"https://{name}/ok.png")
            led = Led(there.server.server_port, certificate)
            asking = fetch(
                away,
                [name],
                MOST_BYTES,
                resolve=partial(resolved, to=[GLOBAL]),
                transport=led,
            )
            if proven:
                assert await asking == FILE
                assert there.asked[-1][1]["host"] == name
            else:
                with pytest.raises(RequestError, match="could not be fetched"):
                    await asking
            assert led.asked == [GLOBAL]
        assert len(there.asked) == 1


def test_files_are_known_where_they_were_fetched_and_nowhere_else() -> None:
    url = "https://images.example.org/ok.png"
    with fetched({url: FILE}):
        assert read_url(url, AT).width == 96
    with pytest.raises(AwayError):
        read_url(url, AT)
    data = base64.b64encode(FILE).decode()
    assert read_url(f"data:image/png;base64,{data}", AT).width == 96


def test_hosts_are_named_without_an_address(tmp_path: Path) -> None:
    flags = ["--model-name", "x", "--data-dir", str(tmp_path), "--image-hosts"]
    named = load([*flags, "Images.example.org:443, 127.0.0.1:8080"])
    assert named.gateway.hosts == ("images.example.org", "127.0.0.1:8080")
    for wrong in ("https://images.example.org", "images.example.org/cats", "*.example.org"):
        with pytest.raises(ConfigError, match="is no host"):
            load([*flags, wrong])
