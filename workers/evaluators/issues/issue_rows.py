"""Rows of SWE data sets in their authors' published form, parsed into one `Issue`.

Supported are rows of SWE-bench 5 (`eval_script`), SWE-bench, Lite, Verified and SWE-Gym (the twelve classic fields),
SWE-smith (`image_name`; its `patch` makes the bug), SWE-rebench (`install_config`), R2E-Gym (`expected_output_json`)
and NeMo Gym's wrapper of one (`responses_create_params`). Other columns are ignored.

Images are named by one template for each data set, which a node's settings may override.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from farm.errors import HandlerError
from farm.records.sandbox_spec import Requirement
from workers.evaluators.issues.issue import TREE, DataSet, EvalType, Issue, made_script, parts, test_command
from workers.evaluators.patches import touched

_NO_STATEMENT = "Some of the project's tests fail. Find the bug that makes them fail, and fix it."
_SMITH_COMMAND = "pytest -rA --disable-warnings --color=no --tb=no"
_R2E_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd {tree}
[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests
: '>>>>> Start Test Output'
if [ -f run_tests.sh ]; then bash run_tests.sh; else bash /run_tests.sh; fi
: '>>>>> End Test Output'
"""
TEMPLATES: Mapping[str, str] = {
    "swe-bench": "docker://swebench/sweb.eval.x86_64.{id_1776}:latest",
    "swe-gym": "docker://xingyaoww/sweb.eval.x86_64.{id_s}:latest",
}
"""For rows without an image. `id_1776` and `id_s` are the instance's id in lower case with another `__`."""
_OF_A_REGISTRY = "docker://"


def _listed(value: Any) -> Any:
    if isinstance(value, str):
        return json.loads(value) if value.strip() else []
    return [] if value is None else value


Tests = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class InstallConfig(BaseModel):
    """The part of SWE-rebench's `install_config` that scoring needs."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    test_cmd: str | tuple[str, ...] = ""
    log_parser: Text = ""


class IssueRow(BaseModel):
    """One row, with its columns' names; documentary columns are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_id: str = Field(min_length=1)
    data_set: DataSet = "swe-bench"
    """The data set whose rules apply; detected by the columns if not given."""
    repo: Text = ""
    base_commit: Annotated[Text, Field(pattern=r"^[0-9a-fA-F]{0,40}$")] = ""
    problem_statement: Text = ""
    hints_text: Text = ""
    patch: Text = ""
    """The gold patch, never shown; for SWE-smith the patch that makes the bug."""
    test_patch: Text = ""
    version: Text = ""
    FAIL_TO_PASS: Tests = ()
    PASS_TO_PASS: Tests = ()
    image: Text = ""
    """If empty, the data set's template applies."""
    eval_script: Text = ""
    log_parser: Annotated[Text, Field(pattern=r"^(parse_log_\w+)?$")] = ""
    """A parser of the swebench library; empty for the repository's."""
    eval_type: EvalType = "pass_and_fail"
    test_cmd: Text = ""
    """The test command without files, for rows without an `eval_script`."""
    install_config: InstallConfig = InstallConfig()
    expected_output_json: Annotated[Mapping[str, str], BeforeValidator(_listed)] = Field(default_factory=dict)
    tree: Annotated[str, Field(pattern=r"^/[\w./-]+$")] = TREE
    git_bundle: str = ""
    """The tree as a git bundle in base64, if the image has none: at `base_commit`, else its branch main."""
    packages: tuple[Requirement, ...] = ()
    """Exact requirements of a Python environment to add to the image, such as pytest's."""

    @model_validator(mode="before")
    @classmethod
    def _of_any_form(cls, given: Any) -> Any:
        return columns(given) if isinstance(given, Mapping) else given

    @field_validator("patch", "test_patch")
    @classmethod
    def _is_patch(cls, patch: str) -> str:
        if patch.strip() and not touched(patch):
            raise ValueError("the patch must be a unified diff with a/ and b/ prefixes")
        return patch

    @model_validator(mode="after")
    def _can_be_scored(self) -> IssueRow:
        if not self.FAIL_TO_PASS and not self.expected_output_json:
            raise ValueError("no test must turn green: give FAIL_TO_PASS, or expected_output_json")
        if self.data_set == "swe-smith" and not self.patch.strip():
            raise ValueError("a row of SWE-smith needs its `patch`, which makes the bug")
        if self.eval_script:
            parts(self.eval_script)
        return self

    @property
    def statement(self) -> str:
        """The issue as shown to the policy."""
        hints = f"\n\nHints:\n{self.hints_text}" if self.hints_text.strip() else ""
        return (self.problem_statement.strip() or _NO_STATEMENT) + hints

    def issue(self) -> Issue:
        """Return the issue to run and score."""
        smith = self.data_set == "swe-smith"
        return Issue(
            instance_id=self.instance_id,
            data_set=self.data_set,
            repo=self.repo,
            tree=self.tree,
            base_commit=self.base_commit,
            eval_script=self._script(),
            log_parser=self._parser(),
            eval_type=self.eval_type,
            fail_to_pass=self.FAIL_TO_PASS,
            pass_to_pass=self.PASS_TO_PASS,
            test_patch=self.test_patch,
            version=self.version,
            bug_patch=self.patch if smith else "",
            bundle=self.git_bundle,
            expected=tuple(sorted(self.expected_output_json.items())),
            gold_paths=tuple(touched(self.patch)),
            gold="" if smith else self.patch,
        )

    def _parser(self) -> str:
        if self.expected_output_json:
            return "parse_log_pytest_v2"
        return self.log_parser or self.install_config.log_parser

    def _script(self) -> str:
        if self.eval_script:
            return self.eval_script
        if self.expected_output_json:
            return _R2E_SCRIPT.format(tree=self.tree)
        test_cmd = self.install_config.test_cmd
        command = self.test_cmd or (test_cmd if isinstance(test_cmd, str) else " && ".join(test_cmd))
        command = command or (_SMITH_COMMAND if self.data_set == "swe-smith" else test_command(self.repo))
        patched = touched(self.test_patch)
        listed = (test.partition("::")[0] for test in (*self.FAIL_TO_PASS, *self.PASS_TO_PASS) if "::" in test)
        return made_script(
            self.tree, self.base_commit, command, patched or list(dict.fromkeys(listed)), self.test_patch
        )


def columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's columns by the names of IssueRow. Raises ValueError for invalid JSON text."""
    if "responses_create_params" in row:
        row = _unwrapped(row)
    fields = dict(row)
    if "expected_output_json" in row and not row.get("instance_id"):
        fields["instance_id"] = f"{row.get('repo_name', '')}__{str(row.get('docker_image', '')).rpartition(':')[2]}"
        fields.setdefault("repo", row.get("repo_name", ""))
    fields["image"] = row.get("image") or row.get("docker_image") or row.get("image_name") or ""
    if isinstance(row.get("install_config"), str):
        fields["install_config"] = json.loads(row["install_config"])
    if fields.get("install_config") is None:
        fields.pop("install_config", None)
    fields["data_set"] = row.get("data_set") or _data_set_of(row)
    return fields


def _data_set_of(row: Mapping[str, Any]) -> DataSet:
    if "expected_output_json" in row:
        return "r2e-gym"
    if "image_name" in row:
        return "swe-smith"
    if row.get("install_config"):
        return "swe-rebench"
    classic = "eval_script" in row or "environment_setup_commit" in row or "image" in row
    return "swe-bench" if classic else "swe-gym"


def _unwrapped(row: Mapping[str, Any]) -> dict[str, Any]:
    metadata = row["responses_create_params"].get("metadata")
    if not isinstance(metadata, Mapping) or "instance_dict" not in metadata:
        raise ValueError("responses_create_params.metadata.instance_dict is missing: not a row of NeMo Gym's swe")
    inner = cast("dict[str, Any]", _listed(metadata["instance_dict"]))
    if not isinstance(inner, dict):
        raise ValueError("responses_create_params.metadata.instance_dict is not a JSON object")
    for name in ("instance_id", "base_commit", "problem_statement"):
        inner.setdefault(name, metadata.get(name))
    name = re.sub(r"[^a-z0-9]", "", str(metadata.get("dataset_name", "")).lower())
    known: dict[str, DataSet] = {
        "swegym": "swe-gym",
        "r2egym": "r2e-gym",
        "rebench": "swe-rebench",
        "smith": "swe-smith",
    }
    form = next((value for key, value in known.items() if key in name), None)
    return {**inner, "data_set": form} if form else inner


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
