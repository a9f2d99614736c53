"""The command that serves a farm over HTTP: `farm api`."""

from __future__ import annotations

import contextlib
import signal

import click

from farm.client import open_store
from farm.service import Service
from farm.settings import settings
from farm.signals import Signals
from farm.terminal import plain_errors

PORT = 8600


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; others only with FARM_API_KEY.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 takes a free one.")
@click.option("--url", help="The farm: a database URL or the folder of an embedded farm. Default: FARM_*.")
@plain_errors
def api(host: str, port: int, url: str | None) -> None:
    """Serve the farm over HTTP until Ctrl-C; farm.connect("http://HOST:PORT") asks it.

    It keeps nothing: any number may run on one database, and each may be killed at any moment. With FARM_API_KEY set,
    it answers nobody who does not send it; TLS is the business of a proxy before it.
    """
    # few commands serve, and it takes long to load
    from farm.api.server import PATIENCE_S, bind, serve, url_of

    key = settings().api_key.strip()
    # the server ends by a signal, and hands it on when it has
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), bind(host, port, key) as listener:
        store, broker_url = open_store(url, PATIENCE_S)
        with contextlib.closing(Service(store, Signals(broker_url), settings().max_open)) as service:
            serve(service, listener, key, lambda: click.echo(url_of(listener)))
