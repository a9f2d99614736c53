"""The tasks of `farm tasks attack`: a folder of Harbor tasks, instances in a file, or rows of a data set."""

from __future__ import annotations

from pathlib import Path

from farm.cli.request_files import read_problems, read_rows_as
from farm.errors import InvalidRequest
from farm.rows.loaded_rows import COLUMNS
from farm.rows.row_forms import FORMS
from farm.tasks.harbor_folder import task_paths
from farm.tasks.harbor_instance import DATA_SOURCE
from workers.cli.task_attacks import Target


def targets_of(path: Path, form: str) -> list[Target]:
    """Return the tasks of a path; `form` is a form of rows or a data source, empty if the rows name it themselves.

    Raises FarmError.
    """
    if path.is_dir():
        if form not in ("", DATA_SOURCE):
            raise InvalidRequest(f"{path} is a folder, whose tasks are always `{DATA_SOURCE}`: leave --as out")
        return [Target(each.name, DATA_SOURCE, folder=each) for each in task_paths(path)]
    if not form:
        file = read_problems(path)
    elif form in FORMS:
        file, _ = read_rows_as(path, form, (), "", None)
    else:
        file, _ = read_rows_as(path, COLUMNS, (), form, None)
    targets = []
    for number, each in zip(file.lines, file.instances, strict=True):
        if not isinstance(each.get("data_source"), str) or not isinstance(each.get("fields"), dict):
            reason = "it has no `data_source` and `fields`: give --as FORM for rows of a data set"
            raise InvalidRequest(reason, field=f"{path}:{number}")
        targets.append(
            Target(str(each.get("instance_id") or f"{path.name}:{number}"), each["data_source"], each["fields"])
        )
    return targets
