"""Takes over changed API keys and a new certificate while the server runs, at SIGHUP."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web

from mlxrun.config.server_settings import find_weak_keys
from mlxrun.config.setting_fields import list_values
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.server.certificate import ServerCertificate
from mlxrun.server.http.access import API_KEYS, CONFIG

log = logging.getLogger(__name__)
KEYS = "server.api_keys"


def reload_config(
    app: web.Application, read_config: Callable[[], Config], certificate: ServerCertificate | None = None
) -> None:
    """Read the config and the files of the certificate again. Use its API keys, and the certificate for new
    connections, from now on. Requests that run go on.

    The log says what has changed. If the config or the certificate is wrong, or the config has no keys any
    more, all stays as it was.
    """
    try:
        config = read_config()
        if app[API_KEYS] and not config.server.api_keys:
            raise ConfigError(f"{KEYS} is empty; restart the server to serve without keys")
        if certificate is not None:
            certificate.reload()
    except ConfigError as error:
        for problem in error.problems or (str(error),):
            log.error("SIGHUP: nothing is reloaded: %s", problem)
        return
    keys, running = config.server.api_keys, app[CONFIG]
    for warning in find_weak_keys(config.server):
        log.warning("%s", warning)
    changes = app[API_KEYS].replace(keys)
    said = [f"{what}: {', '.join(names)}" for what, names in changes.items() if names]
    log.info("SIGHUP: %d API keys%s", len(keys), f" ({'; '.join(said)})" if said else ", as before")
    if certificate is not None:
        log.info("SIGHUP: new connections get the certificate of %s", certificate.path)
    others = list_differences(running, config)
    if others:
        log.warning("SIGHUP: only %s is reloaded; a restart is needed for %s", KEYS, ", ".join(others))


def list_differences(running: Config, config: Config) -> list[str]:
    """List the settings besides the API keys in which two configs differ."""
    pairs = zip(list_values(running), list_values(config), strict=True)
    return [info.path for (info, before), (_, after) in pairs if info.path != KEYS and before != after]
