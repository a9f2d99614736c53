"""The files of a published model that define its tokenizer and chat template: finding and reading them."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from farm.errors import FarmError

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 300.0
_WANTED = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.json",
    "*.jinja",
]
_MORE_TEMPLATES = "additional_chat_templates"
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HINT = "give a folder that has it, or a name on the Hugging Face hub: `--tokenizer FOLDER`"


class TokenizerMissing(FarmError):
    """No usable tokenizer files; the message says what to specify."""


class ModelFiles:
    """The files of one model, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = folder / "tokenizer.json"
        self._config = self._read("tokenizer_config.json")

    def digest(self) -> bytes:
        """Return the digest of the files; equal for all copies."""
        hasher = hashlib.blake2b(digest_size=16)
        names = [path for pattern in _WANTED for path in sorted(self.folder.glob(pattern))]
        for path in [*names, *sorted((self.folder / _MORE_TEMPLATES).glob("*.jinja"))]:
            content = path.read_bytes()
            hasher.update(b"%s %d " % (path.name.encode(), len(content)) + content)
        return hasher.digest()

    def specials(self) -> dict[str, str]:
        """Return the special tokens by their variable names in templates."""
        entries = {**self._read("special_tokens_map.json"), **self._config}
        return {key: text for key in _SPECIALS if (text := _token_text(entries.get(key)))}

    def templates(self) -> dict[str, str]:
        """Return chat templates by name, `default` among them; template files precede the configuration."""
        named = _named(self._config.get("chat_template")) or _named(
            self._read("chat_template.json").get("chat_template")
        )
        if (own := self.folder / "chat_template.jinja").is_file():
            named["default"] = own.read_text()
        return named | {path.stem: path.read_text() for path in (self.folder / _MORE_TEMPLATES).glob("*.jinja")}

    def end_ids(self, id_of: Callable[[str], int | None]) -> set[int]:
        """Return all ids that end a turn: those that generation stops at, and the tokenizer's end-of-sequence token."""
        ids = {
            number
            for name in ("generation_config.json", "config.json")
            for number in _numbers(self._read(name).get("eos_token_id"))
        }
        number = id_of(self.specials().get("eos_token", ""))
        return ids if number is None else ids | {number}

    def n_vocabulary(self) -> int:
        """Return the size of the model's vocabulary, padding included; 0 if the configuration has none."""
        config = self._read("config.json")
        inner = config.get("text_config")
        size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else 0)
        return size if type(size) is int else 0

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            value = orjson.loads(path.read_bytes()) if path.is_file() else {}
        except orjson.JSONDecodeError as error:
            raise TokenizerMissing(f"{path} is not JSON: {error}") from error
        return value if isinstance(value, dict) else {}


class NegativeCache:
    """Names without files on the hub: checked again only after _LOOK_AGAIN_S, not by every rollout."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[str, tuple[float, str]] = {}

    def check(self, name: str) -> None:
        """Raise TokenizerMissing if the name was missing less than _LOOK_AGAIN_S ago."""
        since, message = self._found.get(name, (-_LOOK_AGAIN_S, ""))
        if message and self._clock() - since < _LOOK_AGAIN_S:
            raise TokenizerMissing(message)

    def add(self, name: str, missing: TokenizerMissing) -> None:
        log.warning("%s", missing)
        self._found[name] = (self._clock(), str(missing))


_misses = NegativeCache()


def find(name: str, cache: Path | None = None, misses: NegativeCache = _misses) -> ModelFiles:
    """Return the files of a folder, or of a hub name: from the cache (`cache`, or the user's), else downloaded."""
    if (folder := Path(name).expanduser()).is_dir():
        return _complete(folder, name)
    misses.check(name)
    try:
        return _complete(_hub_folder(name, cache), name)
    except TokenizerMissing as missing:
        misses.add(name, missing)
        raise


def _complete(folder: Path, name: str) -> ModelFiles:
    if (folder / "tokenizer.json").is_file():
        return ModelFiles(folder)
    raise TokenizerMissing(
        f"{name} has no tokenizer.json, and no other kind of tokenizer is supported; save it with a fast tokenizer of "
        f"transformers, or {_HINT}"
    )


def _hub_folder(name: str, cache: Path | None) -> Path:
    # Slow to import, and not needed for folders.
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    reason: Exception
    for local_only in (True, False):
        try:
            path = huggingface_hub.snapshot_download(
                name, cache_dir=cache, allow_patterns=_WANTED, local_files_only=local_only
            )
            if not local_only or (Path(path) / "tokenizer.json").is_file():
                return Path(path)
        except HFValidationError as error:
            raise TokenizerMissing(f"there is no folder {name}, and no such model on a hub; {_HINT}") from error
        # Errors of the network, the hub and its access rules all have the same remedy.
        except Exception as error:
            reason = error
    raise TokenizerMissing(f"the tokenizer of {name} is not available: {reason}; {_HINT}") from reason


def _token_text(value: Any) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def _named(value: Any) -> dict[str, str]:
    """Return a template, or several as `[{"name", "template"}]`, by name."""
    if isinstance(value, str):
        return {"default": value}
    return {entry["name"]: entry["template"] for entry in value} if isinstance(value, list) else {}


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int)]
