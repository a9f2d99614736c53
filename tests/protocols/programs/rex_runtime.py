"""One list of cases on two of SWE-ReX's runtimes: the package's own on this machine, and its client's on the farm."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from swerex.runtime import abstract
from swerex.runtime.local import LocalRuntime

given = json.loads(sys.argv[1])
# the package logs on standard output, until it exits, where this program's results are read
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# otherwise the package's own runtime returns bash's bracketed-paste marks as output
os.environ["TERM"] = "dumb"
sys.path.insert(0, given["examples"])
from farm_deployment import FarmDeployment  # noqa: E402 - the folder is given

_KINDS: dict[str, Any] = {
    "create_session": abstract.CreateBashSessionRequest,
    "close_session": abstract.CloseBashSessionRequest,
    "run_in_session": abstract.BashAction,
    "interrupt": abstract.BashInterruptAction,
    "execute": abstract.Command,
    "read_file": abstract.ReadFileRequest,
    "write_file": abstract.WriteFileRequest,
    "upload": abstract.UploadRequest,
}


async def outcome(runtime: Any, folder: str, verb: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a case, or the class of its exception."""
    said = json.loads(json.dumps(values).replace("FOLDER", folder).replace("HERE", given["here"]))
    request = _KINDS[verb](**said)
    call = getattr(runtime, "run_in_session" if verb == "interrupt" else verb)
    try:
        result = await call(request)
    except Exception as error:
        more = sorted(getattr(error, "extra_info", None) or {})
        return {"raised": type(error).__name__, "extra_info": more}
    answer: dict[str, Any] = result.model_dump()
    return answer


async def run_cases(runtime: Any, folder: str) -> list[dict[str, Any]]:
    return [await outcome(runtime, folder, verb, values) for verb, values in given["cases"]]


async def isolated(runtime: Any) -> list[str]:
    """Return the variables that two concurrent sessions see of each other."""
    names = ("shell1", "shell2")
    await asyncio.gather(*(runtime.create_session(abstract.CreateBashSessionRequest(session=name)) for name in names))
    sets = (abstract.BashAction(command=f"{name}=set", session=name) for name in names)
    await asyncio.gather(*map(runtime.run_in_session, sets))
    shows = (abstract.BashAction(command="echo $shell1 $shell2", session=name) for name in names)
    return [said.output for said in await asyncio.gather(*map(runtime.run_in_session, shows))]


async def main() -> dict[str, Any]:
    local = LocalRuntime()
    own = await run_cases(local, given["folder"])
    await local.close()
    deployment = FarmDeployment(given["url"], given["key"], {"image": "host"})
    await deployment.start()
    alive = await deployment.is_alive(timeout=60)
    farms = await run_cases(deployment.runtime, "/workspace")
    apart = await isolated(deployment.runtime)
    if given["waits"]:
        print(json.dumps("waits"), file=answers, flush=True)
        wait = "touch /tmp/begun; while [ ! -e /tmp/go ]; do sleep 0.1; done"
        await deployment.runtime.run_in_session(abstract.BashAction(command=wait))
    await deployment.stop()
    failing = FarmDeployment(given["url"], given["key"], {"image": "/nowhere.sif"})
    try:
        await failing.start()
        refused = ""
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    return {"own": own, "farms": farms, "alive": bool(alive), "apart": apart, "refused": refused}


Path(given["folder"]).mkdir(exist_ok=True)
print(json.dumps(asyncio.run(main())), file=answers, flush=True)
