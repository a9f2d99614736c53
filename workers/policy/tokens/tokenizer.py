"""A model's tokenizer and chat template, read once per process from a folder or from the Hugging Face hub."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers

from farm.trajectory import TokenIds, token_ids
from workers.policy.tokens.files import ModelFiles, TokenizerMissing, find
from workers.policy.tokens.stream import IdStream
from workers.policy.tokens.template import ChatTemplate

__all__ = ["ModelText", "Tokenizer", "TokenizerMissing", "load"]


_SHORT_CHARS = 4096


class Tokenizer:
    """Text to ids and back. `end_ids` are those that end a turn; safe for any number of threads."""

    def __init__(self, backend: tokenizers.Tokenizer, end_ids: Iterable[int] = ()) -> None:
        self._backend = backend
        self.end_ids = frozenset(end_ids)
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        self.end_texts = tuple(backend.id_to_token(number) for number in sorted(self.end_ids))
        # A token that swallows the space after it would change the text that it is put before.
        self.anchor = next(
            (token.content for _, token in sorted(added.items()) if token.special and not token.rstrip), ""
        )

    def encode(self, text: str) -> TokenIds:
        """int32 [n]. Special tokens in the text are recognised, none are added."""
        if len(text) < _SHORT_CHARS:
            return token_ids(self._backend.encode(text, add_special_tokens=False).ids)
        # without the places of the tokens in the text, which nobody asks for: five times as fast
        return token_ids(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_within(self, text: str) -> TokenIds:
        """The ids of a text that is not the start of anything: no space is put before it, as some tokenizers do."""
        if not self.anchor:
            return self.encode(text)
        return self.encode(self.anchor + text)[1:]

    def decode(self, ids: Sequence[int] | TokenIds, *, special: bool = True) -> str:
        """The text of ids; `special` keeps the special tokens in it."""
        return str(self._backend.decode(list(map(int, ids)), skip_special_tokens=not special))

    def body(self, ids: TokenIds) -> TokenIds:
        """A sampled turn without the end-of-turn id, if that was sampled."""
        return ids[:-1] if self.ended(ids) else ids

    def ended(self, ids: TokenIds) -> bool:
        """Whether a turn ended by itself rather than by a limit or a stop string."""
        return len(ids) > 0 and int(ids[-1]) in self.end_ids

    def stream(self) -> IdStream:
        """Ids to text as they come, end-of-turn ids left out."""
        return IdStream(self.decode, self.end_ids)

    def id_of(self, token: str) -> int:
        """The id of a token. KeyError if there is no such token."""
        number = self._backend.token_to_id(token)
        if number is None:
            raise KeyError(token)
        return int(number)

    def first_special(self, text: str) -> str:
        """The special token that comes first in a text; empty if none does."""
        places = [(place, -len(token), token) for token in self._special if (place := text.find(token)) >= 0]
        return min(places)[2] if places else ""


@dataclass(frozen=True, slots=True)
class ModelText:
    """All that turns a model's conversations into ids. `name` is the folder or the hub name it was read from."""

    tokenizer: Tokenizer
    template: ChatTemplate
    name: str


_loaded: dict[str, ModelText] = {}
_by_content: dict[bytes, ModelText] = {}
_loading: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def load(name: str) -> ModelText:
    """Read a folder with `tokenizer.json`, or a model of the hub (its local cache first, then the network).

    Blocks, for minutes where it downloads. Read once per process: a folder that changes afterwards is not read again.
    Copies of the same files are one model, so that a conversation goes on from one engine to another that has its own.
    Raises TokenizerMissing, or TemplateError if there is no usable chat template.
    """
    with _lock:
        loading = _loading.setdefault(name, threading.Lock())
    with loading:
        if name not in _loaded:
            files = find(name)
            digest = files.digest()
            known = _by_content.get(digest) or model_text(files, name)
            # one of them, if two copies are read at the same time
            _loaded[name] = _by_content.setdefault(digest, known)
        return _loaded[name]


def model_text(files: ModelFiles, name: str) -> ModelText:
    """The tokenizer and the template of a model's files."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    # The Rust side raises bare exceptions.
    except Exception as error:
        raise TokenizerMissing(f"{files.tokenizer} cannot be read: {error}") from error
    tokenizer = Tokenizer(backend, files.end_ids(backend.token_to_id))
    return ModelText(tokenizer, ChatTemplate(files.templates(), files.specials(), name), name)
