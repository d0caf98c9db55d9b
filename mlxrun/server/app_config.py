"""The config of a server, as handlers read it from `request.app`."""

from __future__ import annotations

from aiohttp import web

from mlxrun.config.settings import Config

CONFIG = web.AppKey("config", Config)
CONFIG_HASH = web.AppKey("config_hash", str)
