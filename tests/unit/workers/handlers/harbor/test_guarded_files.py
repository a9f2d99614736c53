"""Paths named by a task."""

from __future__ import annotations

import pytest

from workers.handlers.harbor.harbor_handler import named_paths


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Write it to /etc/nginx/nginx.conf.", {"/etc/nginx/nginx.conf"}),
        ("open('/app/answer.txt')", {"/app/answer.txt"}),
        ('Path("/srv/a b/c")', {"/srv/a"}),
        ("source ~/.bashrc; cat $HOME/.x ${HOME}/y", {"/root/.bashrc", "/root/.x", "/root/y"}),
        ("https://example.org/etc/passwd and a/b/c", set()),
        ("#!/bin/bash", {"/bin/bash"}),
        ("", set()),
    ],
)
def test_paths_in_texts_are_found(text: str, found: set[str]) -> None:
    assert named_paths([text]) == found
