"""A model's tokenizer and chat template, read once per process from a folder or from the Hugging Face hub.

Ids are streamed as text: never half a character, at a cost independent of the text decoded before. The text of an id
can depend on its neighbours (a leading space that decoders drop at the very start, a character spread over several
ids), so a few previous ids are always decoded along, and only the text after theirs is returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import tokenizers

from farm.records.trajectory import TokenIds, token_ids
from workers.policy.tokens.template import ChatTemplate
from workers.policy.tokens.tokenizer_files import ModelFiles, TokenizerMissing, find

_REPLACEMENT = "\ufffd"
# So many ids without a complete character will not become text; they are returned undecoded.
_MAX_WAIT = 256
_NEIGHBOURS = 8

Decode = Callable[[list[int]], str]
__all__ = ["ModelText", "Tokenizer", "TokenizerMissing", "load"]
_SHORT_CHARS = 4096
_loaded: dict[str, ModelText] = {}
_by_content: dict[bytes, ModelText] = {}
_loading: dict[str, threading.Lock] = {}
_lock = threading.Lock()


class IdStream:
    """The decoder of one stream of ids. End-of-turn ids are not text and are omitted."""

    def __init__(self, decode: Decode, left_out: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._left_out = left_out
        self._window: list[int] = []
        self._n_before = 0
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Return the newly completed text."""
        self._window += [token for token in map(int, ids) if token not in self._left_out]
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) < len(text) and len(self._window) - self._n_before <= _MAX_WAIT:
            return self._give(whole)
        new = self._give(text)
        self._move()
        return new

    def end(self) -> str:
        """Return the remaining text, incomplete characters as U+FFFD."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new

    def _move(self) -> None:
        """Keep the last few ids as the neighbours of the next ones."""
        del self._window[: self._n_before]
        self._window = self._window[-self._n_neighbours() :]
        self._n_before = len(self._window)
        self._sent = len(self._decode(self._window))

    def _n_neighbours(self) -> int:
        """Return how many ids to keep: the fewest that make whole characters, from a few on."""
        for count in range(_NEIGHBOURS, min(len(self._window), 2 * _NEIGHBOURS)):
            if _REPLACEMENT not in self._decode(self._window[-count:]):
                return count
        return len(self._window)


class Tokenizer:
    """Converts text to ids and back. `end_ids` are those that end a turn; thread-safe.

    `size` is above all ids that the model can sample: its own `n_vocabulary`, which may be padded, or the tokenizer's.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_ids: Iterable[int] = (), n_vocabulary: int = 0) -> None:
        self._backend = backend
        self.size = max(n_vocabulary, max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        self.end_ids = frozenset(end_ids)
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        self.end_texts = tuple(backend.id_to_token(number) for number in sorted(self.end_ids))
        # A token that also strips the space after it would change the following text.
        self.anchor = next(
            (token.content for _, token in sorted(added.items()) if token.special and not token.rstrip), ""
        )

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text, int32 [n]. Special tokens in it are recognised, none are added."""
        if len(text) < _SHORT_CHARS:
            return token_ids(self._backend.encode(text, add_special_tokens=False).ids)
        # Without the tokens' offsets, which are not needed: five times as fast.
        return token_ids(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_within(self, text: str) -> TokenIds:
        """Return the ids of a text that continues another: without the space that some tokenizers put before a text."""
        if not self.anchor:
            return self.encode(text)
        return self.encode(self.anchor + text)[1:]

    def decode(self, ids: Sequence[int] | TokenIds, *, special: bool = True) -> str:
        """Return the text of ids; `special` includes the special tokens."""
        return str(self._backend.decode(list(map(int, ids)), skip_special_tokens=not special))

    def body(self, ids: TokenIds) -> TokenIds:
        """Return a sampled turn without its end-of-turn id, if it has one."""
        return ids[:-1] if self.ended(ids) else ids

    def ended(self, ids: TokenIds) -> bool:
        """Return whether a turn ended by an end-of-turn id rather than by a limit or a stop string."""
        return len(ids) > 0 and int(ids[-1]) in self.end_ids

    def stream(self) -> IdStream:
        """Return a decoder for streamed ids, which omits end-of-turn ids."""
        return IdStream(self.decode, self.end_ids)

    def texts(self, ids: TokenIds) -> tuple[str, ...]:
        """Return the text that each id adds to those before it: empty for parts of a character and end ids."""
        stream = self.stream()
        texts = [stream.feed([token]) for token in map(int, ids)]
        rest = stream.end()
        return (*texts[:-1], texts[-1] + rest) if texts else ()

    def id_of(self, token: str) -> int:
        """Return the id of a token. Raises KeyError if there is no such token."""
        number = self._backend.token_to_id(token)
        if number is None:
            raise KeyError(token)
        return int(number)

    def first_special(self, text: str) -> str:
        """Return the first special token in a text; empty if there is none."""
        matches = [(index, -len(token), token) for token in self._special if (index := text.find(token)) >= 0]
        return min(matches)[2] if matches else ""


@dataclass(frozen=True, slots=True)
class ModelText:
    """Everything that converts a model's conversations to ids. `name` is the folder or hub name it was read from."""

    tokenizer: Tokenizer
    template: ChatTemplate
    name: str


def load(name: str) -> ModelText:
    """Read a folder with `tokenizer.json`, or a model of the hub (its local cache first, then the network).

    Blocks; a download may take minutes. Read once per process: later changes of a folder have no effect. Copies of the
    same files are one model, as a conversation may move to an engine that has its own copy. Raises TokenizerMissing, or
    TemplateError if there is no usable chat template.
    """
    with _lock:
        loading = _loading.setdefault(name, threading.Lock())
    with loading:
        if name not in _loaded:
            files = find(name)
            digest = files.digest()
            known = _by_content.get(digest) or model_text(files, name)
            # A single one, even if two copies are read at the same time.
            _loaded[name] = _by_content.setdefault(digest, known)
        return _loaded[name]


def model_text(files: ModelFiles, name: str) -> ModelText:
    """Read the tokenizer and the template of a model's files. Raises TokenizerMissing, TemplateError."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    # The Rust side raises bare exceptions.
    except Exception as error:
        raise TokenizerMissing(f"{files.tokenizer} cannot be read: {error}") from error
    tokenizer = Tokenizer(backend, files.end_ids(backend.token_to_id), files.n_vocabulary())
    return ModelText(tokenizer, ChatTemplate(files.templates(), files.specials(), name), name)
