"""NLTK data for word games: the packages install none; an error names what a game lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("nltk==3.9.1", "regex==2026.11.15", "joblib==1.5.2", "click==8.5.1", "tqdm==4.70.1")
_NAMES = ("words", "averaged_perceptron_tagger_eng")
"""All data that the games need."""
_MISSING = re.compile(r"nltk\.download\('([\w-]+)'\)")


@contextmanager
def named_if_missing(game: str) -> Iterator[None]:
    """Raise ValueError with the name of missing data and its install command, in place of NLTK's long text."""
    try:
        yield
    except LookupError as error:
        if (missing := _MISSING.search(str(error))) is None:
            raise
        names = " ".join(dict.fromkeys((*_NAMES, missing[1])))
        raise ValueError(
            f"{game} needs the data {missing[1]!r} of NLTK, which the image lacks: install it by "
            f"`python -m nltk.downloader -d /usr/share/nltk_data {names}`, on the node for the image `host`"
        ) from None
