"""Pages ask no host but the one that they come from."""

from html.parser import HTMLParser

import httpx
import pytest
from starlette.routing import Route

from support.pages import OTHER_HOST
from xain_coordinator.config.sections.http import HttpSettings
from xain_coordinator.http_face.app import make_app

HTTP = HttpSettings(port=8080)


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids.update(value for name, value in attrs if name == "id" and value)
        self.links += [value for name, value in attrs if name in ("href", "src") and value]


async def get(path: str) -> httpx.Response:
    app = make_app(None, HTTP)  # type: ignore[arg-type]  # pages ask no session
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
        return await client.get(path)


def pages() -> list[str]:
    """The paths of the HTTP face that answer with a page."""
    app = make_app(None, HTTP)._app  # type: ignore[arg-type]  # pages ask no session
    routes = [route for route in app.routes if isinstance(route, Route)]
    return [route.path for route in routes if route.path not in app.openapi()["paths"]]


def test_pages_are_those_that_the_next_test_reads():
    assert sorted(pages()) == ["/v1/docs", "/v1/openapi.json"]


@pytest.mark.parametrize("path", ["/v1/docs", "/v1/openapi.json"])
async def test_page_of_the_face_names_no_other_host(path):
    answer = await get(path)
    assert answer.status_code == 200
    assert not OTHER_HOST.search(answer.text)


async def test_page_about_the_face_has_all_paths_and_bodies_without_scripts():
    answer = await get("/v1/docs")
    described = (await get("/v1/openapi.json")).json()
    parsed = Parsed(answer.text)
    assert not parsed.tags & {"script", "link", "img", "iframe"}
    assert parsed.ids == described["components"]["schemas"].keys()
    for path, methods in described["paths"].items():
        for method in methods:
            assert f"<h2>{method.upper()} {path}</h2>" in answer.text
    for link in parsed.links:
        assert link == "/v1/openapi.json" or link.removeprefix("#") in parsed.ids
    assert "default-src 'none'" in answer.headers["content-security-policy"]
