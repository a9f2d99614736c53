"""An environment with tools and a simulated user: the user is another LLM, in the batch's role `user`."""

from __future__ import annotations

import random

from workers.environments.environment import Action, AskModel, Begin, ChatMessage, Episode, Step

STOP = "###STOP###"
_PERSONA = (
    "You are a customer of a shop, and speak with its clerk. You want to {wish}. Say so in your own words, answer what "
    f"you are asked, and reveal nothing else. Once it is done, say {STOP} and nothing more."
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "cancel_order",
            "description": "Cancel an order.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
]


class Shop:
    """The policy is a clerk who must cancel the order that the customer means; the reward is for the final orders.

    Only the customer knows the order's number, so they have to talk.
    """

    roles = ("user",)

    def __init__(self, ask: AskModel) -> None:
        self._ask = ask
        self._heard: list[ChatMessage] = []
        self._open: set[int] = set()
        self._meant = 0

    def reset(self, episode: Episode) -> Begin:
        self._open = set(random.sample(range(100, 1000), 3))
        self._meant = random.choice(sorted(self._open))
        persona = _PERSONA.format(wish=f"cancel your order {self._meant}")
        self._heard = [{"role": "system", "content": persona}, {"role": "user", "content": "Hello, how can I help?"}]
        system = "You are the clerk of a shop. Do what the customer asks for, by your tools."
        return Begin(
            [{"role": "system", "content": system}, {"role": "user", "content": self._customer_reply()}], _TOOLS
        )

    def step(self, action: Action) -> Step:
        if action.tool_calls:
            return Step(
                [
                    {"role": "tool", "tool_call_id": c.call_id, "content": self._cancel(c.arguments)}
                    for c in action.tool_calls
                ]
            )
        self._heard.append({"role": "user", "content": action.text})
        reply = self._customer_reply()
        if STOP in reply:
            return Step(reward=float(len(self._open) == 2 and self._meant not in self._open), terminated=True)
        return Step([{"role": "user", "content": reply}])

    def close(self) -> float | None:
        return None

    def _customer_reply(self) -> str:
        """Return the customer's next message; for its model, the clerk is the user."""
        reply = self._ask("user", self._heard)
        self._heard.append({"role": "assistant", "content": reply})
        return reply

    def _cancel(self, arguments: dict[str, object]) -> str:
        number = arguments.get("number")
        if number not in self._open:
            return f"There is no open order {str(number)[:20]}."
        self._open.discard(number)
        return f"Order {number} is cancelled."
