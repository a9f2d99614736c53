"""The commands that serve HTTP: `farm api` for a farm, and `farm web --demo` for a recorded batch."""

from __future__ import annotations

import contextlib
import signal
from functools import partial
from pathlib import Path

import click

from farm.cli.console import plain_errors, runs_farm
from farm.startup import frozen_imports, limit_full_collections

PORT = 8600


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 picks a free one.")
@click.option("--url", help="The farm: a database URL or the folder of an embedded farm. Default: FARM_*.")
@click.option(
    "--speak",
    multiple=True,
    metavar="NAME[=PORT],…",
    help="Also serve the protocols of other systems: below /NAME/, or at the root of a separate PORT.",
)
@click.option(
    "--strict-compat",
    is_flag=True,
    help="Make these protocols reproduce even the faults of those systems; each page of "
    "docs/reference/protocols.md lists them.",
)
@click.option("--tls-cert", type=click.Path(dir_okay=False), help="Serve HTTPS with this certificate, a PEM file.")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="The certificate's key, a PEM file.")
@click.option("--web/--no-web", default=True, show_default=True, help="Serve the page for browsers, below /web/.")
@plain_errors
@runs_farm
def api(
    host: str,
    port: int,
    url: str | None,
    speak: tuple[str, ...],
    strict_compat: bool,
    tls_cert: str | None,
    tls_key: str | None,
    web: bool,
) -> None:
    """Serve the farm over HTTP until Ctrl-C.

    farm.connect("http://HOST:PORT") uses it. It is stateless: any number may run on one database, and each may be
    killed at any moment. Requests must send a key of `farm keys` or the farm's key, which is FARM_API_KEY, else the one
    in FARM_HOME; that is created if missing, and clients of the same user find it.
    """
    with frozen_imports():
        from farm.api.app import WAIT_TIMEOUT_S, TlsFiles, serve
        from farm.api.endpoints import ApiConfig
        from farm.api.protocols import SpokenProtocol
        from farm.api.protocols import spoken as protocol
        from farm.cli.doctor import examine_farm
        from farm.cli.listening import bind, url_of
        from farm.client.local import LocalFarm, open_store
        from farm.home import own_key
        from farm.notifications import Signals
        from farm.observing import process_log
        from farm.scheduler.broker import check_broker
        from farm.settings import settings
        from farm.web.app import application

    spoken: list[SpokenProtocol] = [protocol(name, own_port) for name, own_port in _names(speak)]
    if bool(tls_cert) != bool(tls_key):
        raise click.UsageError("--tls-cert and --tls-key go together")
    tls = TlsFiles(tls_cert, tls_key) if tls_cert and tls_key else None
    if tls is not None:
        tls.check()
    key = own_key(settings())
    process_log.set_up(settings(), "api")
    limit_full_collections()
    # the server stops on a signal, and raises it again afterwards
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(bind(host, port))
        listeners = [listener, *(sockets.enter_context(bind(host, each.port)) for each in spoken if each.port)]
        store, broker_url = open_store(url, WAIT_TIMEOUT_S)
        check_broker(broker_url)
        with contextlib.closing(LocalFarm(store, Signals(broker_url), settings().max_open)) as farm:
            store.read(farm.secret_key.check)
            examine = partial(examine_farm, settings(), store.url, broker_url)
            address = url_of(listener) if tls is None else url_of(listener).replace("http:", "https:", 1)
            listening = partial(click.echo, address)
            serve(
                farm,
                ApiConfig.of(settings(), strict_compat),
                listeners,
                key,
                listening,
                lambda: list(examine()),
                spoken,
                tls,
                partial(application, records_history=True) if web else None,
            )


@click.command()
@click.option("--demo", is_flag=True, help="Serve the recorded batch that comes with the package.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 picks a free one.")
@plain_errors
@runs_farm
def web(demo: bool, host: str, port: int) -> None:
    """Serve the page with a recorded batch, without a farm, until Ctrl-C: --demo.

    The batch is one of `make demo`. Everybody who can reach the port sees it without a key, and can change nothing. The
    page of a farm is served by `farm api`, `farm up` and `farm head`.
    """
    import secrets
    import tempfile

    from farm.api.app import serve
    from farm.api.endpoints import ApiConfig
    from farm.callers import Scope
    from farm.cli.listening import bind, url_of
    from farm.client.local import LocalFarm
    from farm.client.verb_groups import NewKey
    from farm.notifications import Signals
    from farm.settings import settings
    from farm.web.app import application
    from farm.web.recorded_batch import recorded_store
    from farm.web.rendering import ROOT

    if not demo:
        raise click.UsageError("--demo is required; `farm api` serves the page of a farm")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        bind(host, port) as listener,
        tempfile.TemporaryDirectory(prefix="farm-web-") as folder,
        contextlib.closing(LocalFarm(recorded_store(Path(folder)), Signals(""), max_open=0)) as farm,
    ):
        visitor_key = farm.access.add(NewKey(name="demo", scopes=[Scope.READ]))
        note = "(a recorded batch, read-only; Ctrl-C ends it)"
        listening = partial(click.echo, f"page    {url_of(listener)}{ROOT}/ {note}")
        page = partial(application, visitor_key=visitor_key)
        serve(farm, ApiConfig.of(settings()), [listener], secrets.token_hex(24), listening, page=page)


def _names(speak: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return (name, port) for each `NAME[=PORT]`; port 0 means no port."""
    protocols = []
    for part in ",".join(speak).split(",") if speak else ():
        name, has_port, port = part.strip().partition("=")
        if has_port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise click.UsageError(f"--speak {part}: the port must be a number from 1 to 65535")
        protocols.append((name, int(port) if has_port else 0))
    return protocols
