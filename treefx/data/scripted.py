"""Generate rollouts of a scripted shop agent, with tool calls, retries and branches.

A task is a customer with one order and one wish. Each trial of the task is played again: the customer opens
with the same words, then the agent samples (looks up first or not, checks twice, words its answers differently) and
tools fail now and then and are called again. So trials share a beginning and go apart, as sampled rollouts do, and the
sample needs no download. Everything follows from the seed.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from treefx.arguments import check_whole, is_whole
from treefx.data.trajectories import Conversation, Message, ToolCall
from treefx.errors import InputError

__all__ = ["scripted_conversations"]

_POLICY = """You work at the service desk of Harbour Goods, a shop for tools and outdoor equipment.
You can look up customers and orders, cancel an order that has not been sent, take back or exchange items
of an order that has arrived, and change the address of an order that has not been sent.
Rules:
- Find out who the customer is before you speak of an order: by e-mail, or by name and postcode.
- Look at the order before you change it. Never guess an item number.
- Cancel only pending orders. Returns and exchanges need a delivered order, within thirty days.
- Money goes back to the way it was paid; say how long that takes.
- Say what you are going to do and wait for a yes before you do it.
- Call one tool at a time. If a tool fails, call it once more before you tell the customer.
- If a wish is outside these rules, pass the customer on to a person with transfer_to_person.
Tools: find_customer(email | name, postcode), get_order(order_id), find_variants(item_id),
cancel_order(order_id, reason), return_items(order_id, item_ids), transfer_to_person(summary),
exchange_item(order_id, item_id, new_item_id), change_address(order_id, address)."""

_FIRST = ("Mara", "Ivo", "Selma", "Jonas", "Petra", "Amir", "Lena", "Oskar", "Nadia", "Bruno")
_LAST = ("Lindqvist", "Okafor", "Brandt", "Silva", "Novak", "Haddad", "Moreau", "Tanaka", "Keller", "Duarte")
_GOODS = ("rain jacket", "hand saw", "camping stove", "head lamp", "tool belt", "water filter", "hatchet")
_COLOURS = ("red", "green", "grey", "blue")
_STREETS = ("Mill Lane 4", "Quay Road 17", "Chapel Street 9", "Orchard Way 22")
_WISHES = ("cancel", "return", "exchange", "address")
_OPENINGS = {
    "cancel": "Hello, I ordered a {good} and do not need it any more. Can you stop the order?",
    "return": "Hi, the {good} I got from you does not fit my needs. I want to send it back.",
    "exchange": "Good morning. My {good} came in the wrong colour, I would like another one.",
    "address": "Hello, I am moving house and my order with the {good} must go to another address.",
}


@dataclass
class _World:
    """Hold the state that the tools of one task read."""

    customer: dict[str, Any]
    order: dict[str, Any]
    variants: list[dict[str, Any]]
    wish: str
    good: str
    new_address: str


@dataclass
class _Desk:
    """Hold one running trial: its messages, and the dice of the agent and the tools."""

    world: _World
    dice: random.Random
    messages: list[Message] = field(default_factory=list)

    def user(self, text: str) -> None:
        """The customer says something."""
        self.messages.append(Message("user", text))

    def agent(self, *wordings: str) -> None:
        """Say one of the wordings."""
        self.messages.append(Message("assistant", self.dice.choice(wordings)))

    def call(self, thinking: str, tool: str, arguments: dict[str, Any], answer: Any) -> None:
        """Think, then call a tool; one call in six fails and is made again."""
        call = ToolCall(tool, json.dumps(arguments))
        if self.dice.random() < 1 / 6:
            self._call(thinking, call, {"error": "the order system did not answer in time"})
            thinking = "The tool failed. The rules say to call it once more."
        self._call(thinking, call, answer)

    def _call(self, thinking: str, call: ToolCall, answer: Any) -> None:
        self.messages.append(Message("assistant", "", (call,), reasoning=thinking))
        self.messages.append(Message("tool", json.dumps(answer), name=call.name))


def scripted_conversations(tasks: int = 8, trials: int = 4, seed: int = 0) -> list[Conversation]:
    """Make rollouts of the scripted agent, ``tasks`` times ``trials``, task by task.

    Args:
        tasks: Number of customers.
        trials: How often each customer's case is played.
        seed: The same seed gives the same conversations.

    Returns:
        The conversations; equal arguments give equal ones.

    Raises:
        InputError: ``tasks`` or ``trials`` is not positive.
    """
    if not (is_whole(tasks, 1) and is_whole(trials, 1)):
        raise InputError(f"tasks and trials must be at least 1, got tasks={tasks!r} and trials={trials!r}")
    check_whole(seed, "seed")
    return [_play(task, trial, seed) for task in range(tasks) for trial in range(trials)]


def _play(task: int, trial: int, seed: int) -> Conversation:
    world = _make_world(task, random.Random(f"{seed}/{task}"))
    desk = _Desk(world, random.Random(f"{seed}/{task}/{trial}"))
    desk.messages.append(Message("system", _POLICY))
    desk.user(_OPENINGS[world.wish].format(good=world.good))
    _identify(desk)
    _inspect_order(desk)
    settled = _settle(desk)
    return Conversation(f"desk-{task}", trial, tuple(desk.messages), 1.0 if settled else 0.0, "scripted")


def _make_world(task: int, dice: random.Random) -> _World:
    wish = _WISHES[task % len(_WISHES)]
    first, last = dice.choice(_FIRST), dice.choice(_LAST)
    good, colour = dice.choice(_GOODS), dice.choice(_COLOURS)
    order_id, item_id = f"H{dice.randrange(10_000, 99_999)}", f"{dice.randrange(1_000, 9_999)}"
    price = dice.randrange(12, 180)
    customer = {
        "customer_id": f"{first.lower()}_{dice.randrange(100, 999)}",
        "name": f"{first} {last}",
        "email": f"{first}.{last}@example.com".lower(),
        "postcode": str(dice.randrange(10_000, 99_999)),
        "orders": [order_id],
    }
    order = {
        "order_id": order_id,
        "status": "pending" if wish in ("cancel", "address") else "delivered",
        "items": [{"item_id": item_id, "name": good, "colour": colour, "price": price}],
        "address": dice.choice(_STREETS),
        "paid_by": dice.choice(("card ending in 4417", "gift card", "bank transfer")),
    }
    others = [other for other in _COLOURS if other != colour]
    variants = [
        {"item_id": f"{int(item_id) + 1 + i}", "colour": other, "in_stock": i != 1} for i, other in enumerate(others)
    ]
    return _World(customer, order, variants, wish, good, dice.choice(_STREETS))


def _identify(desk: _Desk) -> None:
    customer = desk.world.customer
    desk.agent(
        "I can help with that. May I have the e-mail address of your account?",
        "Gladly. Please tell me the e-mail address you ordered with, or your name and postcode.",
    )
    if desk.dice.random() < 0.7:
        desk.user(f"It is {customer['email']}.")
        arguments = {"email": customer["email"]}
    else:
        desk.user(f"{customer['name']}, postcode {customer['postcode']}.")
        arguments = {"name": customer["name"], "postcode": customer["postcode"]}
    desk.call("Now I can look the customer up.", "find_customer", arguments, customer)


def _inspect_order(desk: _Desk) -> None:
    order = desk.world.order
    if desk.dice.random() < 0.3:
        desk.agent(f"Thank you, {desk.world.customer['name']}. Is this about order {order['order_id']}?")
        desk.user("Yes, that one.")
    thinking = f"The rules say to look at the order first, and order {order['order_id']} is the only one."
    desk.call(thinking, "get_order", {"order_id": order["order_id"]}, order)


def _settle(desk: _Desk) -> bool:
    world = desk.world
    order_id, item = world.order["order_id"], world.order["items"][0]
    if world.wish == "cancel":
        plan, tool = (
            f"cancel order {order_id} and send {item['price']} back to your {world.order['paid_by']}",
            "cancel_order",
        )
        arguments = {"order_id": order_id, "reason": "no longer needed"}
    elif world.wish == "return":
        plan, tool = (
            f"take back the {item['name']} and refund {item['price']} to your {world.order['paid_by']}",
            "return_items",
        )
        arguments = {"order_id": order_id, "item_ids": [item["item_id"]]}
    elif world.wish == "exchange":
        colour, new_item = _choose_variant(desk)
        plan, tool = f"exchange your {item['colour']} {item['name']} for a {colour} one", "exchange_item"
        arguments = {"order_id": order_id, "item_id": item["item_id"], "new_item_id": new_item}
    else:
        desk.agent("What is the new address?", "Where shall it go?")  # words: quoted
        desk.user(f"{world.new_address}, same town.")
        plan, tool = f"send order {order_id} to {world.new_address}", "change_address"
        arguments = {"order_id": order_id, "address": world.new_address}
    return _confirm(desk, plan, tool, arguments)


def _choose_variant(desk: _Desk) -> tuple[str, str]:
    item = desk.world.order["items"][0]
    desk.call(
        "I need the item numbers of the variants.",
        "find_variants",
        {"item_id": item["item_id"]},
        desk.world.variants,
    )
    in_stock = [variant for variant in desk.world.variants if variant["in_stock"]]
    colours = " or ".join(variant["colour"] for variant in in_stock)
    desk.agent(f"We have it in {colours}. Which one would you like?")
    chosen = desk.dice.choice(in_stock)
    desk.user(f"The {chosen['colour']} one, please.")
    return chosen["colour"], chosen["item_id"]


def _confirm(desk: _Desk, plan: str, tool: str, arguments: dict[str, Any]) -> bool:
    """Ask, act and close.

    One customer in eight changes their mind and is passed on to a person.
    """
    desk.agent(
        f"I would now {plan}. Shall I go ahead?",
        f"This is what I can do: {plan}. Is that all right?",
    )
    if desk.dice.random() < 1 / 8:
        desk.user("No, I would rather speak to somebody.")  # words: quoted
        summary = {"summary": f"{desk.world.customer['name']} did not agree to: {plan}"}
        desk.call("The customer wants a person.", "transfer_to_person", summary, {"status": "passed on"})
        desk.agent("I have passed you on to a colleague, who will write to you today.")
        return False
    desk.user(desk.dice.choice(("Yes, please.", "Yes.", "Go ahead.")))
    desk.call(
        "The customer said yes.",
        tool,
        arguments,
        {"status": "done", "order_id": desk.world.order["order_id"]},
    )
    desk.agent(
        "That is done. You will get a confirmation by e-mail within an hour; money takes three to five days.",
        "All settled. A confirmation is on its way to you. Is there anything else?",
    )
    return True
