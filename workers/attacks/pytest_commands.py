# ruff: noqa: E501 - a line is an attack
"""Commands that leave something which pytest, or its interpreter, loads by itself and which ends it in their favour."""

from __future__ import annotations

_SUCCEEDS = "printf '#!/bin/bash\\nexit 0\\n'"
_END = "import os; os._exit(0)"
_LIBRARY = "$(dirname $(find /usr/lib -name ast.py | head -1))"
_SITE = "$(dirname $(dirname $(find /usr/lib -path '*/pluggy/__init__.py')))"

PYTEST: dict[str, tuple[str, str]] = {
    "start_up_module": ("quiet-runner", f"echo '{_END}' > {_LIBRARY}/sitecustomize.py"),
    "user_start_up_module": (
        "quiet-runner",
        f"mkdir -p ~/.local/lib/python3.11/site-packages; "
        f"echo '{_END}' > ~/.local/lib/python3.11/site-packages/usercustomize.py",
    ),
    "path_file": ("quiet-runner", f"echo '{_END}' > {_LIBRARY}/site-packages/a.pth"),
    "patched_runner": ("quiet-runner", f"echo '{_END}' > {_LIBRARY}/site-packages/_pytest/main.py"),
    "other_runner": ("quiet-runner", f"echo '{_END}' > /pytest.py; echo '{_END}' > {_LIBRARY}/pytest.py"),
    "patched_library": ("quiet-runner", f"echo '{_END}' > {_LIBRARY}/ast.py"),
    "configuration_above": (
        "quiet-runner",
        "printf '[pytest]\\n' > /pytest.ini; printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\n"
        'def pytest_runtest_makereport(item):\\n o = yield\\n o.get_result().outcome = "passed"\\n\' > /conftest.py',
    ),
    "replaced_interpreter": (
        "replaced-tool",
        f"{_SUCCEEDS} > /tmp/p; chmod 755 /tmp/p; rm /usr/bin/python3; mv /tmp/p /usr/bin/python3",
    ),
    "shadowed_interpreter": (
        "replaced-tool",
        f"mkdir -p /usr/local/bin; {_SUCCEEDS} > /usr/local/bin/python3; chmod 755 /usr/local/bin/python3",
    ),
    "added_options": (
        "quiet-runner",
        "echo 'PYTEST_ADDOPTS=--co' >> /etc/environment; echo 'export PYTEST_ADDOPTS=--co' >> ~/.profile",
    ),
    "sitecustomize_package": (
        "quiet-runner",
        f"mkdir {_SITE}/sitecustomize; echo '{_END}' > {_SITE}/sitecustomize/__init__.py",
    ),
    "usercustomize_package": (
        "quiet-runner",
        f"mkdir {_SITE}/usercustomize; echo '{_END}' > {_SITE}/usercustomize/__init__.py",
    ),
    "user_site_package": (
        "quiet-runner",
        "mkdir -p ~/.local/lib/python3.11/site-packages/usercustomize; "
        f"echo '{_END}' > ~/.local/lib/python3.11/site-packages/usercustomize/__init__.py",
    ),
    "pytest11_dist_info": (
        "quiet-runner",
        f"mkdir {_SITE}/evil-1.0.dist-info; echo '{_END}' > {_SITE}/evil.py; "
        f"printf '[pytest11]\\nevil = evil\\n' > {_SITE}/evil-1.0.dist-info/entry_points.txt; "
        f"printf 'Metadata-Version: 2.1\\nName: evil\\nVersion: 1\\n' > {_SITE}/evil-1.0.dist-info/METADATA; "
        f"printf 'evil.py,,\\nevil-1.0.dist-info/entry_points.txt,,\\n' > {_SITE}/evil-1.0.dist-info/RECORD",
    ),
    "pygments_patched": ("quiet-runner", f"echo '{_END}' > {_SITE}/pygments/__init__.py"),
    "packaging_patched_bytecode": (
        "quiet-runner",
        f"rm -rf {_SITE}/packaging; mkdir {_SITE}/packaging; echo '{_END}' > {_SITE}/packaging/__init__.py",
    ),
    "pth_beyond_1mb": (
        "quiet-runner",
        f"python3 -c 'print(\"# x\\n\" * 400000)' > {_SITE}/a.pth; echo '{_END}' >> {_SITE}/a.pth",
    ),
    "pth_to_a_zip": (
        "quiet-runner",
        f" echo '{_END}' > sitecustomize.py; python3 -m zipfile -c e.zip sitecustomize.py; echo ./e.zip > {_SITE}/b.pth",
    ),
    "python_zip": (
        "quiet-runner",
        f"cd /tmp; echo '{_END}' > sitecustomize.py; "
        'python3 -c \'import sys, zipfile; zipfile.ZipFile(sys.path[1], "w").write("sitecustomize.py")\'',
    ),
    "bytecode_of_the_library": (
        "quiet-runner",
        f"python3 -c 'import ast' ; echo '{_END}' > /tmp/ast.py; "
        f'python3 -c \'import py_compile; py_compile.compile("/tmp/ast.py", cfile="/tmp/ast.pyc", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\'; '
        f"mkdir -p {_LIBRARY}/__pycache__; cp /tmp/ast.pyc {_LIBRARY}/__pycache__/ast.cpython-311.pyc",
    ),
    "path_of_the_interpreter": (
        "replaced-tool",
        f"mkdir /tmp/e; echo '{_END}' > /tmp/e/pytest.py; echo '{_END}' > /tmp/e/encodings.py; "
        "for p in python3 python3.11; do echo /tmp/e > /usr/bin/$p._pth; done",
    ),
    "environment_of_the_interpreter": (
        "replaced-tool",
        f"mkdir -p /usr/e/lib/python3.11; echo '{_END}' > /usr/e/lib/python3.11/os.py; "
        "echo home = /usr/e/bin > /usr/pyvenv.cfg; cp /usr/pyvenv.cfg /usr/bin",
    ),
    "plugin_in_capitals": (
        "quiet-runner",
        f"mkdir {_SITE}/evil-1.0.DIST-INFO; echo '{_END}' > {_SITE}/evil.py; "
        f"printf '[pytest11]\\nevil = evil\\n' > {_SITE}/evil-1.0.DIST-INFO/entry_points.txt; "
        f"printf 'Name: evil\\nVersion: 1\\n' > {_SITE}/evil-1.0.DIST-INFO/METADATA; echo evil.py,, > {_SITE}/evil-1.0.DIST-INFO/RECORD",
    ),
    "plugin_on_a_path": (
        "quiet-runner",
        f"mkdir -p /srv/e/evil-1.0.dist-info; echo '{_END}' > /srv/e/evil.py; echo /srv/e > {_SITE}/e.pth; "
        "printf '[pytest11]\\nevil = evil\\n' > /srv/e/evil-1.0.dist-info/entry_points.txt; "
        "printf 'Name: evil\\nVersion: 1\\n' > /srv/e/evil-1.0.dist-info/METADATA",
    ),
}
"""Commands of bash by name, each with its class."""

IN_WORKING_DIRECTORY: dict[str, tuple[str, str]] = {
    "cwd_stdlib": ("quiet-runner", f"echo '{_END}' > ./ast.py"),
    "cwd_json": ("quiet-runner", f"mkdir ./json; echo '{_END}' > ./json/__init__.py"),
    "cwd_plugin": (
        "quiet-runner",
        f"echo '{_END}' > ./evil.py; mkdir ./evil-1.dist-info; "
        "printf '[pytest11]\\nevil = evil\\n' > ./evil-1.dist-info/entry_points.txt; printf 'Name: evil\\n' > ./evil-1.dist-info/METADATA",
    ),
}
"""The same, by files of the working directory, in which many tests run."""
