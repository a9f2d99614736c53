"""Files of packages in rpm databases: as rpm itself lists them, and safe against files that a policy writes."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import time
from pathlib import Path

import pytest

from tests.services.apptainer import HOME
from workers.sandboxes.isolation.restoring.footprint import files_of, recorded

DATA = Path(__file__).parents[5] / "data/rpm"
NAME = "rpmdb.sqlite"
MODULE = "usr/lib/python3.11/site-packages/told"
FILES = (
    *(f"{MODULE}/__init__.py", f"{MODULE}/deep/er/x.py", "usr/bin/told", "usr/lib64/libtold.so.1", "etc/told.conf"),
    *("usr/share/told/a b", "usr/share/told/é", "usr/share/told/empty-folder"),
)
SPEC = f"""Name: told-%{{part}}
Version: 1.0
Release: 1
Summary: A package
License: none
BuildArch: noarch
AutoReqProv: no
%description
A package.
%install
mkdir -p %{{buildroot}}/usr/share/told/empty-folder
for name in {" ".join(f"'{name}'" for name in FILES[:-1])}; do
  mkdir -p "%{{buildroot}}/$(dirname "$name")"; echo %{{part}} > "%{{buildroot}}/${{name}}%{{part}}"
done
%files
/*
"""


def rpm() -> tuple[str, dict[str, str]]:
    """Return the folder of rpm's programs, and their environment: this machine's, or those fetched by `make rpm`."""
    if found := shutil.which("rpmbuild"):
        return str(Path(found).parent), dict(os.environ)
    prefix = HOME / "rpm/usr"
    if not (prefix / "bin/rpmbuild").exists():
        pytest.skip("no rpm on this machine: run `make rpm`")
    libraries = ":".join(str(each) for each in (prefix / "lib").glob("*-linux-*"))
    path = f"{prefix}/bin:{prefix}/lib/rpm:{os.environ['PATH']}"
    own = {"RPM_CONFIGDIR": f"{prefix}/lib/rpm", "LD_LIBRARY_PATH": libraries, "PATH": path}
    own["MAGIC"] = f"{prefix}/lib/file/magic.mgc"
    return str(prefix / "bin"), {**os.environ, **own}


def installed(folder: Path) -> tuple[bytes, set[str]]:
    """Return a database in which rpm has installed two packages and removed a third, and the files that it lists."""
    programs, env = rpm()

    def run(*words: str) -> str:
        own = (
            f"--define=_topdir {folder}/build",
            "--define=_db_backend sqlite",
            f"--define=_dbpath {folder}/database",
            "--define=_buildhost localhost",
        )
        argv = [f"{programs}/{words[0]}", *own, f"--define=_tmppath {folder}/tmp", *words[1:]]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (folder / "tmp").mkdir(parents=True)
    (folder / "told.spec").write_text(SPEC)
    for part in ("one", "two", "three"):
        run("rpmbuild", "-bb", "--quiet", f"--define=part {part}", str(folder / "told.spec"))
    run("rpmdb", "--initdb")
    run("rpm", "-i", "--justdb", "--nodeps", "--noscripts", *map(str, folder.glob("build/RPMS/*/*.rpm")))
    run("rpm", "-e", "--justdb", "--nodeps", "--noscripts", "told-three")
    listed = {line.strip("/") for line in run("rpm", "-qal").splitlines()}
    return (folder / "database" / NAME).read_bytes(), listed


def test_new_database_has_the_files_that_rpm_lists(tmp_path: Path) -> None:
    data, listed = installed(tmp_path)
    assert {f"{MODULE}/__init__.pyone", "usr/share/told/a btwo", "usr/share/told/empty-folder"} < listed
    assert not any(name.endswith("three") for name in listed)
    assert set(files_of(data)) == listed


@pytest.fixture
def kept() -> tuple[bytes, set[str]]:
    """A recorded database, and rpm's list of its files; see its README."""
    listed = (DATA / "listed.txt").read_text().splitlines()
    return gzip.decompress((DATA / f"{NAME}.gz").read_bytes()), {line.strip("/") for line in listed}


def test_recorded_database_has_the_files_that_rpm_listed(kept: tuple[bytes, set[str]]) -> None:
    assert set(files_of(kept[0])) == kept[1]


@pytest.mark.parametrize("folder", ["usr/lib/sysimage/rpm", "var/lib/rpm"])
def test_database_is_read_in_the_places_of_distributions(
    kept: tuple[bytes, set[str]], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, listed = kept
    name = NAME
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(parents=True)
    Path(folder, name).write_bytes(data)
    Path("elsewhere").write_bytes(data)
    assert recorded([f"{folder}/{name}"]) == listed
    assert recorded(["elsewhere", f"{folder}/absent"]) == frozenset()
    Path(folder, name).rename(tmp_path / "moved")
    Path(folder, name).symlink_to("/dev/zero")
    assert recorded([f"{folder}/{name}"]) == frozenset(), "a link is not followed"
    Path(folder, name).unlink()
    os.mkfifo(Path(folder, name))
    assert recorded([f"{folder}/{name}"]) == frozenset(), "a pipe is not waited for"


def test_broken_database_has_fewer_files_and_raises_nothing(kept: tuple[bytes, set[str]]) -> None:
    data, listed = kept
    chance = random.Random(7)
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(chance.choice([1, 5, 200])):
            at = chance.randrange(len(broken))
            broken[at] ^= 1 << chance.randrange(8)
        assert len(set(files_of(bytes(broken)))) <= len(listed) + 200
    for length in (0, 1, 15, 16, 17, 31, 100, 4095, 4096, 5000, len(data) // 2, len(data) - 1):
        assert len(set(files_of(data[:length]))) <= len(listed)


def header(names: list[bytes], folders: list[bytes], indexes: list[int], counts: list[int] | None = None) -> bytes:
    """Return the header of a package."""
    store = b"".join(name + b"\0" for name in names)
    at = len(store)
    store += b"".join(name + b"\0" for name in folders)
    store += bytes(-len(store) % 4)
    of_indexes = len(store)
    store += struct.pack(f">{len(indexes)}I", *indexes)
    n_names, n_folders, n_indexes = counts or [len(names), len(folders), len(indexes)]
    rows = [(1117, 8, 0, n_names), (1118, 8, at, n_folders), (1116, 4, of_indexes, n_indexes)]
    return struct.pack(">II", len(rows), len(store)) + b"".join(struct.pack(">iIiI", *row) for row in rows) + store


def database(folder: Path, *statements: str, blobs: tuple[bytes, ...] = ()) -> bytes:
    file = folder / "made.sqlite"
    connection = sqlite3.connect(file)
    for statement in statements or ("CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, blob BLOB NOT NULL)",):
        connection.execute(statement)
    for blob in blobs:
        connection.execute("INSERT INTO Packages (blob) VALUES (?)", (blob,))
    connection.commit()
    connection.close()
    return file.read_bytes()


def test_header_with_invalid_entries_lists_only_valid_files(tmp_path: Path) -> None:
    whole = header([b"a", b"b"], [b"/usr/", b"/x/../y/"], [0, 1])
    assert list(files_of(database(tmp_path, blobs=(whole,)))) == ["usr/a", "y/b"]
    odd = (
        header([b"a", b"b"], [b"/usr/"], [0, 7]),
        header([b"a"], [b"/usr/"], [0], [1, 1, 1 << 31]),
        header([b"a"], [b"/usr/"], [0], [1 << 31, 1, 1]),
        struct.pack(">II", 0xFFFFFFFF, 0xFFFFFFFF) + bytes(100),
        b"",
        b"\0" * 7,
    )
    (tmp_path / "made.sqlite").unlink()
    assert list(files_of(database(tmp_path, blobs=odd))) == ["usr/a"]


_NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n"
RECURSION = f"{_NUMBERS}) SELECT x AS hnum, zeroblob(9) AS blob FROM n"
SCHEMES: dict[str, tuple[str, ...]] = {
    "view": (f"CREATE VIEW Packages AS {RECURSION}",),
    "computed": (
        "CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, x, blob AS (zeroblob(900000000)))",
        "INSERT INTO Packages (x) VALUES (1), (2), (3)",
    ),
    "many": (
        "CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, x BLOB, blob AS (zeroblob(90000)))",
        f"INSERT INTO Packages (x) SELECT 1 FROM ({_NUMBERS} LIMIT 100000) SELECT x FROM n)",
    ),
    "another-table": ("CREATE TABLE Others (blob)",),
    "another-column": ("CREATE TABLE Packages (hnum)",),
    "text": ("CREATE TABLE Packages (blob)", "INSERT INTO Packages VALUES ('text'), (7), (NULL)"),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_malicious_database_takes_little_time_and_lists_nothing(name: str, tmp_path: Path) -> None:
    data = database(tmp_path, *SCHEMES[name])
    began = time.process_time()
    assert list(files_of(data)) == []
    assert time.process_time() - began < 10.0
