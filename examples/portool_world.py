"""The scripted world of `portool.py`: eight tools, tasks of three to seven steps or more, careless demonstrations.

The language has some two hundred words, one token each. Every task has prices, temperatures, homes and events,
drawn from the task's number, so nothing can be known without asking. In each step the agent calls one tool, or gives
its answer; "->" begins the world's reply:

    question temperature in fahrenheit where anna lives at lunch ?
    search anna end        -> nothing found , try again
    search anna end        -> anna is in rome
    calendar lunch end     -> lunch is at 14
    weather rome 14 end    -> rome has 21
    convert 21 fahrenheit end -> that is 69
    answer 69 end

Steps differ in worth: a search may fail and be tried again, a guess in place of a question mostly spoils the answer,
and `look`, which few demonstrations use, saves a step:

    calendar lunch end     -> lunch is at 14
    look anna 14 end       -> anna has 21
    convert 21 fahrenheit end -> that is 69
    answer 69 end
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treefx.rl import Outcome

__all__ = ["END", "VOCABULARY", "Task", "World", "decode", "demonstrate", "encode", "expert"]

CITIES = ("rome", "oslo", "cairo", "lima", "paris", "delhi")
PEOPLE = ("anna", "ben", "carla", "david", "emma", "farid")
ITEMS = ("tea", "bread", "rice", "milk", "soap", "salt")
SHOPS = ("corner", "market", "mill", "harbor", "kiosk", "dairy")
EVENTS = ("lunch", "dinner", "meeting", "training", "concert", "party")
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "times": lambda a, b: a * b,
}
UNITS: Mapping[str, Callable[[int], int]] = {
    "fahrenheit": lambda celsius: 32 + celsius * 9 // 5,
    "dollar": lambda euro: euro * 11 // 10,
}
PLACES = ((PEOPLE, CITIES), (ITEMS, SHOPS))
LARGEST = 99
"""Numbers are words, from 0 to this one."""
GUESS = "6"
"""The hour it is, to those who do not ask."""
FAILING = 0.3
"""How often a search or a look finds nothing."""
SHORT = 0.15
"""How often a demonstration looks instead of searching."""

TOOLS = """
you answer questions with the help of tools . in every step call one tool , or answer , and say end .
clock : the hour it is now . example : clock end
calendar event : the hour of an event . events are lunch dinner meeting training concert party .
example : calendar dinner end
weather city hour : the temperature in celsius . it changes every hour , so always give the hour .
example : weather oslo 9 end
price shop hour : what a shop takes for its item , in euro . it changes every hour , so always give the hour .
example : price market 17 end
search name : the city of a person , or the shop of an item . it finds nothing now and then ; then try again .
example : search ben end
look name hour : the temperature where a person lives , or the price of an item . it finds nothing now and then , too .
example : look ben 17 end
convert number unit : celsius to fahrenheit , or euro to dollar . example : convert 20 fahrenheit end
calc number operation number : operations are plus minus times . example : calc 3 times 8 end
answer number : this ends the task . answer unknown if there is no way to know . example : answer 42 end
question
"""
_WORDS = """
-> ? hours until temperature price of where lives at in now nothing found try again that is not a call it has takes
"""
_NAMES = (*CITIES, *PEOPLE, *ITEMS, *SHOPS, *EVENTS, *OPERATIONS, *UNITS, *map(str, range(LARGEST + 1)))
VOCABULARY = tuple(dict.fromkeys([*TOOLS.split(), *_WORDS.split(), *_NAMES]))
_NUMBER = {word: number for number, word in enumerate(VOCABULARY)}
END = _NUMBER["end"]
"""The token that ends a step."""


def encode(text: str) -> list[int]:
    """Token ids of a text, one per word."""
    return [_NUMBER[word] for word in text.split()]


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    return " ".join(VOCABULARY[token] for token in tokens)


@dataclass(frozen=True)
class Task:
    """A question, and the facts of the world in which it is asked.

    Attributes:
        kind: "temperature", "price" or "hours" (until an event).
        subject: a person or an item; "" for hours.
        count: how many of the item.
        event: at what time; "now" where the clock says it.
        unit: what the result is converted to; "" if it is not.
        hour: it is now.
        events: the hour of each.
        places: the city of each person, the shop of each item.
        weather: of each city, the temperature at every hour.
        prices: of each shop, at every hour.
    """

    kind: str
    subject: str
    count: int
    event: str
    unit: str
    hour: int
    events: Mapping[str, int]
    places: Mapping[str, str]
    weather: Mapping[str, Sequence[int]]
    prices: Mapping[str, Sequence[int]]

    @classmethod
    def draw(cls, number: int) -> "Task":
        """The task of a number, at least 0, which decides everything."""
        random = np.random.default_rng(number)
        kind = ("temperature", "price", "hours")[random.choice(3, p=[0.4, 0.4, 0.2])]
        subjects = {"temperature": PEOPLE, "price": ITEMS, "hours": [""]}[kind]
        unit = {"temperature": "fahrenheit", "price": "dollar", "hours": ""}[kind]
        return cls(
            kind=kind,
            subject=str(random.choice(subjects)),
            count=int(random.integers(1, 5)) if kind == "price" else 1,
            event="now" if kind != "hours" and random.random() < 0.5 else str(random.choice(EVENTS)),
            unit=unit if random.random() < 0.6 else "",
            hour=int(random.integers(0, 12)),
            events={event: int(random.integers(12, 24)) for event in EVENTS},
            places={name: str(random.choice(of)) for names, of in PLACES for name in names},
            weather={city: random.integers(0, 31, 24).tolist() for city in CITIES},
            prices={shop: random.integers(2, 21, 24).tolist() for shop in SHOPS},
        )

    @property
    def question(self) -> str:
        """In words."""
        unit = f"in {self.unit}" if self.unit else ""
        when = self.event if self.event == "now" else f"at {self.event}"
        if self.kind == "hours":
            return f"hours until {self.event} ?"
        if self.kind == "price":
            return f"price {unit} of {self.count} {self.subject} {when} ?"
        return f"temperature {unit} where {self.subject} lives {when} ?"

    @property
    def truth(self) -> int:
        """The right answer."""
        hour = self.hour if self.event == "now" else self.events[self.event]
        if self.kind == "hours":
            return hour - self.hour
        if self.kind == "price":
            value = self.count * self.prices[self.places[self.subject]][hour]
        else:
            value = self.weather[self.places[self.subject]][hour]
        return UNITS[self.unit](value) if self.unit else value


@dataclass(frozen=True)
class World:
    """The environment of `treefx.rl.rollout`: tasks are numbers, the state is the task, rewards are PORTool's.

    Attributes:
        malformed: reward of a step that is no call; others have 0.
    """

    malformed: float = -0.2

    def start(self, number: int) -> tuple[Task, list[int]]:
        """The task, and its prompt: the tools and the question."""
        task = Task.draw(number)
        return task, encode(f"{TOOLS} {task.question}")

    def act(self, task: Task, tokens: list[int], seed: int) -> Outcome:
        """Run one step: 1 for the right answer, -1 for a wrong one, 0 for "unknown" or none at all."""
        match decode(tokens).split():
            case ["answer", "unknown", "end"]:
                return Outcome(task, done=True)
            case ["answer", value, "end"] if value.isdigit():
                return Outcome(task, done=True, reward=1.0 if int(value) == task.truth else -1.0)
            case [*call, "end"] if (reply := run_tool(task, call, seed)) is not None:
                return Outcome(task, encode(f"-> {reply} ."), reward=-1.0)
        return Outcome(task, encode("-> that is not a call ."), reward=-1.0, step_reward=self.malformed)


def run_tool(task: Task, call: Sequence[str], seed: int) -> str | None:
    """Return a tool's reply; None for anything but a call. `seed` is the luck of searches."""
    match call:
        case ["clock"]:
            return f"it is {task.hour}"
        case ["calendar", event] if event in EVENTS:
            return f"{event} is at {task.events[event]}"
        case ["weather", city, hour] if city in CITIES and hour.isdigit() and int(hour) < 24:
            return f"{city} has {task.weather[city][int(hour)]}"
        case ["price", shop, hour] if shop in SHOPS and hour.isdigit() and int(hour) < 24:
            return f"{shop} takes {task.prices[shop][int(hour)]}"
        case ["search", name] if name in task.places:
            lucky = np.random.default_rng(seed).random() >= FAILING
            return f"{name} is in {task.places[name]}" if lucky else "nothing found , try again"
        case ["look", name, hour] if name in task.places and hour.isdigit() and int(hour) < 24:
            if np.random.default_rng(seed).random() < FAILING:
                return "nothing found , try again"
            place, at = task.places[name], int(hour)
            return f"{name} has {task.weather[place][at] if name in PEOPLE else task.prices[place][at]}"
        case ["convert", number, unit] if number.isdigit() and unit in UNITS:
            return _result(UNITS[unit](int(number)))
        case ["calc", one, operation, other] if one.isdigit() and other.isdigit() and operation in OPERATIONS:
            return _result(OPERATIONS[operation](int(one), int(other)))
    return None


def _result(number: int) -> str | None:
    return f"that is {number}" if 0 <= number <= LARGEST else None


def expert(task: Task, slips: Callable[[], bool] = lambda: False, *, short: bool = False) -> Generator[str, str, None]:
    """Do a task: yields calls, is sent the replies, and ends with an answer.

    `slips` decides wherever a careless agent cuts a corner: gives up instead of trying again, guesses the hour
    instead of asking, leaves out a calculation at the end. `short` looks in place of search and price or weather.
    """
    if task.kind == "hours":
        value = _last((yield f"calendar {task.event}"))
        now = GUESS if slips() else _last((yield "clock"))
        if not slips():
            value = _last((yield f"calc {value} minus {now}"))
        yield f"answer {value}"
        return
    asks, place = "clock" if task.event == "now" else f"calendar {task.event}", ""
    if not short:
        place = yield from _found(f"search {task.subject}", slips)
        if not place:
            return
    hour = GUESS if slips() else _last((yield asks))
    if short:
        value = yield from _found(f"look {task.subject} {hour}", slips)
        if not value:
            return
    else:
        value = _last((yield f"{'price' if task.kind == 'price' else 'weather'} {place} {hour}"))
    if task.count > 1 and not slips():
        value = _last((yield f"calc {task.count} times {value}"))
    if task.unit and not slips():
        value = _last((yield f"convert {value} {task.unit}"))
    yield f"answer {value}"


def _found(call: str, slips: Callable[[], bool]) -> Generator[str, str, str]:
    """Try a call until it finds something; "" from who gives up, and has answered."""
    while (reply := (yield call)).startswith("nothing"):
        if slips():
            yield "answer unknown"
            return ""
    return _last(reply)


def _last(reply: str) -> str:
    return reply.split()[-1]


def demonstrate(number: int, carelessness: float) -> tuple[list[int], list[bool], float]:
    """Demonstrate a task by an agent that slips with this probability.

    Returns:
        The row's token ids, which of them are the agent's, and the reward.
    """
    random = np.random.default_rng([number, 1])
    task, row = World().start(number)
    own = [False] * len(row)
    agent = expert(task, lambda: random.random() < carelessness, short=random.random() < SHORT)
    call = next(agent)
    while True:
        said = encode(f"{call} end")
        outcome = World().act(task, said, int(random.integers(2**62)))
        row += [*said, *outcome.observation]
        own += [True] * len(said) + [False] * len(outcome.observation)
        if outcome.done:
            return row, own, outcome.reward
        call = agent.send(decode(outcome.observation[1:-1]))
