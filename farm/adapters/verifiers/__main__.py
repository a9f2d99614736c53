"""The command `python -m farm.adapters.verifiers`, which a trainer starts in a separate environment."""

from __future__ import annotations

import asyncio
import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from farm.adapters.verifiers.env_server import FarmEnvServer, InstanceOf, instance_of
from farm.client.connect import connect
from farm.client.gathered_rollouts import GatheredRollouts
from farm.errors import InvalidRequest


def _loaded(name: str) -> InstanceOf:
    """Return the function with a name `package.module:function`. Raises InvalidRequest."""
    module, _, attribute = name.partition(":")
    try:
        function: InstanceOf = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(f"{error}; expected package.module:function", field="--instance") from error
    return function


def _fields(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field="--request") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{path} is not a JSON object", field="--request")
    return fields


@click.command()
@click.option("--address", default="tcp://127.0.0.1:5000", show_default=True, help="To be served; port 0 is any.")
@click.option("--farm", "url", help="The farm, as `farm.connect` takes it.  [default: FARM_STORE_URL]")
@click.option(
    "--request",
    "request_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Fields of a batch request (farm.BatchRequest) for all rollouts, as JSON.",
)
@click.option("--instance", help="package.module:function that makes a farm.Instance of a task's data.")
@click.option(
    "--routed-experts",
    type=click.IntRange(1, 256),
    metavar="N",
    help="The model's num_experts_per_tok, for a trainer that replays the routing of the engine.",
)
@click.option("--ignore", multiple=True, metavar="NAME", help="A sampling parameter that the farm lacks, to leave out.")
def main(
    address: str,
    url: str | None,
    request_file: Path | None,
    instance: str | None,
    routed_experts: int | None,
    ignore: tuple[str, ...],
) -> None:
    """Serve verifiers' clients, such as prime-rl, with rollouts of a farm until Ctrl-C. Prints its address."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    request = {} if request_file is None else _fields(request_file)
    make = instance_of if instance is None else _loaded(instance)
    client = connect(url)
    rollouts = GatheredRollouts(client)

    async def serve() -> None:
        options: dict[str, Any] = {"request": request, "ignored": ignore, "routed_experts": routed_experts}
        server = FarmEnvServer(rollouts, address, instance=make, **options)
        click.echo(server.address)
        await server.run()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        pass
    finally:
        rollouts.close()
        client.close()


if __name__ == "__main__":
    main()
