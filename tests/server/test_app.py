"""The application: which surfaces it has, and what all of them answer."""

from __future__ import annotations

from mlxrun.config.settings import ApiSettings, Config, ServerSettings
from mlxrun.server.endpoints import admin
from tests.helpers.server_fakes import (
    MINI,
    run_server,
)

ONLY = [MINI, admin.SURFACE]


async def test_every_get_endpoint_answers_head() -> None:
    async with run_server(surfaces=ONLY) as s:
        for path in ("/health", "/v1/status"):
            reply = await s.request("HEAD", path)
            assert (reply.status, reply.body) == (200, b"")
        assert (await s.request("HEAD", "/mini")).status == 405


async def test_every_surface_is_registered_and_can_be_switched_off() -> None:
    from mlxrun.server.app import list_surfaces

    surfaces = list_surfaces()
    names = [surface.name for surface in surfaces]
    assert sorted(set(names)) == sorted(ApiSettings.__dataclass_fields__)
    off = Config(server=ServerSettings(port=0), apis=ApiSettings(**dict.fromkeys(names, False)))
    async with run_server(off) as s:
        for surface in surfaces:
            for endpoint in surface.endpoints:
                path = endpoint.path.replace("{", "").replace("}", "")
                reply = await s.request(endpoint.method, path)
                assert reply.status == 404, endpoint.path
                assert f"apis.{surface.name}" in reply.json["error"]["message"]
        assert (await s.get("/health")).status == 200
