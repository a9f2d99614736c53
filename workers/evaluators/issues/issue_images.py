"""Images of SWE data sets, by one template each, which a node's settings may override."""

from __future__ import annotations

from collections.abc import Mapping

from farm.errors import HandlerError
from workers.evaluators.issues.issue_rows import IssueRow

TEMPLATES: Mapping[str, str] = {
    "swe-bench": "docker://swebench/sweb.eval.x86_64.{id_1776}:latest",
    "swe-gym": "docker://xingyaoww/sweb.eval.x86_64.{id_s}:latest",
}
"""For rows without an image. `id_1776` and `id_s` are the instance's id in lower case with another `__`."""
_OF_A_REGISTRY = "docker://"


def image_of(row: IssueRow, templates: Mapping[str, str]) -> str:
    """Return the image of a row: by the node's template for its data set, else the row's own, else by TEMPLATES.

    A template may use `{instance_id}`, `{id_1776}`, `{id_s}`, and `{image}`, the row's own image without its tag.
    Raises HandlerError, not retryable, if there is no image or the template is wrong.
    """
    template = templates.get(row.data_set, "")
    if not template and row.image:
        return named(row.image)
    template = template or TEMPLATES.get(row.data_set, "")
    low = row.instance_id.lower()
    values = {
        "instance_id": row.instance_id,
        "id_1776": low.replace("__", "_1776_"),
        "id_s": low.replace("__", "_s_"),
        "image": row.image.rpartition(":")[0] if ":" in row.image.rpartition("/")[2] else row.image,
    }
    if not template:
        raise HandlerError(
            f"{row.instance_id} names no image, and {row.data_set} has no template: set FARM_SWE_IMAGES",
            retryable=False,
        )
    try:
        return named(template.format(**values))
    except (KeyError, ValueError, IndexError) as error:
        raise HandlerError(
            f"FARM_SWE_IMAGES: the template {template!r} of {row.data_set} is invalid: {error!r}; it may use "
            f"{', '.join('{' + name + '}' for name in values)}",
            retryable=False,
        ) from None


def named(image: str) -> str:
    """Return an image as a SandboxSpec names it: a name without a kind that is not a path is a registry's."""
    plain = image == "host" or image.startswith("/") or ":/" in image or "-archive:" in image
    plain = plain or image.endswith((".sif", ".def", ".j2", ".tar", ".tgz", ".tar.gz"))
    return image if plain else f"{_OF_A_REGISTRY}{image}"
