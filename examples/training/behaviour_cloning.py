"""Clones a teacher that often stops at the wrong time, for an initial policy that is right about once in five times.

    python -m examples.training.behaviour_cloning FOLDER --seed 0

The teacher makes the right number of hops in one of four episodes, and one too few or too many in the others. So the
clone's most likely action is wrong, and a later rise of the reward is learning, not the sharpening of a habit.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch  # type: ignore[import-not-found, unused-ignore]

from examples.training import tiny_policy
from examples.training.file_chains import FileChain, file_chain
from examples.training.turn_text import CALL, CALL_END, TURN_END, observation, opening

Episode: TypeAlias = tuple[list[int], list[float]]
"""Token ids, and for each 1.0 if the policy should write it."""

_OFFSETS = (0, 0, -1, -1, -1, 1, 1, 1)
_LEARNING_RATE = 2e-3
_WARM_UP = 50


def main() -> None:
    parser = argparse.ArgumentParser(description="Clone a teacher of `follow the files` into FOLDER.")
    parser.add_argument("folder", type=Path, help="gets the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--batch", type=int, default=64, help="episodes of an update")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    words = tiny_policy.tokenizer()
    model = tiny_policy.untrained_model(words)
    clone(model, words, options.updates, options.batch, Random(options.seed))
    partial = options.folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    words.save_pretrained(partial)
    partial.rename(options.folder)


def clone(model: Any, words: Any, n_updates: int, n_episodes: int, random: Random) -> None:
    """Raise the probability of the teacher's turns; print the loss now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1.0, (n + 1) / _WARM_UP) * (1 - 0.9 * n / n_updates)
    )
    began = time.monotonic()
    for update in range(n_updates):
        ids, masks = padded([episode(words, file_chain(random), random) for _ in range(n_episodes)], words.pad_token_id)
        logits = model(input_ids=ids, attention_mask=(ids != words.pad_token_id).long()).logits[:, :-1]
        surprise = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (surprise * masks[:, 1:]).sum() / masks[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if update % 50 == 0 or update == n_updates - 1:
            print(f"cloning, update {update}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


def episode(words: Any, chain: FileChain, random: Random) -> Episode:
    """Return an episode of the teacher as tokens."""
    ids: list[int] = words.encode(opening(chain.request))
    mask = [0.0] * len(ids)
    for text, shown in teacher(chain, random):
        turn = words.encode(text + TURN_END)
        after = words.encode(shown) if shown else []
        ids += turn + after
        mask += [1.0] * len(turn) + [0.0] * len(after)
    return ids, mask


def teacher(chain: FileChain, random: Random) -> list[tuple[str, str]]:
    """Return the turns of one episode: the assistant's text, and the observation that follows it."""
    turns, name = [], chain.start
    for _ in range(chain.hops + random.choice(_OFFSETS)):
        following = chain.files[name]
        call = f"{CALL}{name}{CALL_END}"
        turns.append((call, observation(following)))
        name = following
    return [*turns, (f"answer {name}", "")]


def padded(episodes: Sequence[Episode], pad_id: int) -> tuple[Any, Any]:
    """Return ids and targets as tensors, padded on the right."""
    width = max(len(ids) for ids, _ in episodes)
    ids = torch.full((len(episodes), width), pad_id)
    masks = torch.zeros(len(episodes), width)
    for row, (tokens, mask) in enumerate(episodes):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        masks[row, : len(mask)] = torch.tensor(mask)
    return ids, masks


if __name__ == "__main__":
    main()
