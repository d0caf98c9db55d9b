"""The tool skill: the right call among one to four tools, results, and rounds up to three deep."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.embedded_model import words
from tools.embedded_model.render import dumps
from tools.embedded_model.skills import Example, add, assistant, sub, system, user
from tools.embedded_model.talk import chat
from tools.embedded_model.words import TEST, fresh

Make = Callable[[random.Random], Any]


@dataclass
class Tool:
    """One kind of tool: its possible names, its parameters, how it is asked for, what it gives.

    ``params`` maps a slot of the queries to (JSON type, possible names, maker of a value).
    """

    names: list[str]
    about: str
    params: dict[str, tuple[str, list[str], Make]]
    queries: list[str]
    result: Callable[[random.Random], dict]
    answer: str


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def _of(values: list) -> Make:
    return lambda rng: rng.choice(values)


def _int(low: int, high: int) -> Make:
    return lambda rng: rng.randint(low, high)


def _path(rng: random.Random) -> str:
    ending = rng.choice(("txt", "md", "csv", "log"))
    return f"{rng.choice(words.NOUNS)}/{rng.choice(words.NOUNS)}.{ending}"


_CITY = ("string", ["city", "location", "place"], words.city)
_SKY = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy"]

TOOLS = [
    Tool(["get_weather", "weather", "current_weather", "fetch_weather"], "Get the weather in a city.",
         {"c": _CITY},
         ["What is the weather in {c}?", "How is the weather in {c}?", "Weather in {c}?",
          "Is it warm in {c}?", "Tell me the weather in {c}."],
         lambda r: {"temperature": r.randint(-9, 39), "sky": r.choice(_SKY)},
         "It is {temperature} degrees and {sky} in {c}."),
    Tool(["get_time", "local_time", "current_time", "clock"], "Get the local time of a city.",
         {"c": _CITY},
         ["What time is it in {c}?", "Tell me the time in {c}.", "Time in {c}?"],
         lambda r: {"time": _clock(r)}, "It is {time} in {c}."),
    Tool(["multiply", "times", "product"], "Multiply two numbers.",
         {"a": ("integer", ["a", "x", "first"], _int(2, 999)),
          "b": ("integer", ["b", "y", "second"], _int(2, 999))},
         ["What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b}", "Compute {a} times {b}."],
         lambda r: {"result": r.randint(4, 99999)}, "The result is {result}."),
    Tool(["send_message", "message", "send_text", "send_email"], "Send a message to a person.",
         {"n": ("string", ["to", "person", "recipient"], words.name),
          "t": ("string", ["text", "message", "body"],
                lambda r: r.choice((words.thing(r), words.sentence(r).rstrip("."))))},
         ["Send {n} the message: {t}", "Tell {n}: {t}", "Write to {n}: {t}"],
         lambda r: {"status": r.choice(("sent", "queued"))}, "The message to {n} is {status}."),
    Tool(["set_timer", "timer", "start_timer"], "Start a timer.",
         {"m": ("integer", ["minutes", "duration", "length"], _int(1, 120))},
         ["Set a timer for {m} minutes.", "Wake me in {m} minutes.", "Start a timer of {m} minutes."],
         lambda r: {"ends": _clock(r)}, "The timer ends at {ends}."),
    Tool(["set_alarm", "alarm", "add_alarm"], "Set an alarm.",
         {"t": ("string", ["time", "at", "when"], _clock)},
         ["Set an alarm for {t}.", "Wake me at {t}.", "Alarm at {t}, please."],
         lambda r: {"status": r.choice(("ok", "set"))}, "The alarm for {t} is {status}."),
    Tool(["search", "web_search", "find_pages", "search_web"], "Search the web.",
         {"q": ("string", ["query", "q", "terms"], words.thing)},
         ["Search the web for {q}.", "Search for {q}.", "Look up {q} on the web."],
         lambda r: {"title": words.thing(r), "count": r.randint(1, 900)},
         "I found {count} pages, the first is {title}."),
    Tool(["play_song", "play_music", "play"], "Play a song.",
         {"s": ("string", ["title", "song", "name"], words.thing)},
         ["Play the song {s}.", "I want to hear {s}.", "Put on {s}."],
         lambda r: {"artist": words.name(r)}, "Now playing {s} by {artist}."),
    Tool(["translate", "translate_text", "translator"], "Translate text.",
         {"t": ("string", ["text", "input", "phrase"], words.thing),
          "l": ("string", ["language", "target", "to"], _of(words.LANGUAGES))},
         ["Translate {t} into {l}.", "What is {t} in {l}?", "Say {t} in {l}."],
         lambda r: {"text": words.invented(r)}, "In {l} it is {text}."),
    Tool(["stock_price", "get_stock", "get_price"], "Get the price of a stock.",
         {"s": ("string", ["symbol", "ticker", "stock"],
                lambda r: "".join(r.choice("ABCDEFGHKLMNPRSTVXZ") for _ in range(r.randint(3, 4))))},
         ["What is the price of {s}?", "How much is the stock {s}?", "Stock price of {s}?"],
         lambda r: {"price": r.randint(1, 999)}, "The price of {s} is {price}."),
    Tool(["convert", "convert_currency", "exchange"], "Convert money.",
         {"a": ("number", ["amount", "value", "sum"], _int(1, 9999)),
          "f": ("string", ["from", "source", "from_currency"], _of(words.CURRENCIES)),
          "t": ("string", ["to", "target", "to_currency"], _of(words.CURRENCIES))},
         ["Convert {a} {f} to {t}.", "How many {t} are {a} {f}?", "Change {a} {f} into {t}."],
         lambda r: {"amount": r.randint(1, 9999)}, "That is {amount} {t}."),
    Tool(["book_table", "reserve_table", "reservation"], "Book a table.",
         {"p": ("integer", ["people", "guests", "seats"], _int(1, 12)),
          "t": ("string", ["time", "at", "when"], _clock)},
         ["Book a table for {p} at {t}.", "I need a table for {p} people at {t}.",
          "Reserve a table at {t} for {p}."],
         lambda r: {"table": r.randint(1, 60)}, "You have table {table} at {t}."),
    Tool(["add_event", "create_event", "calendar"], "Add an event to the calendar.",
         {"e": ("string", ["title", "event", "name"], words.thing),
          "d": ("string", ["day", "date", "weekday"], _of(words.DAYS))},
         ["Add the event {e} on {d}.", "Put {e} in my calendar on {d}.", "Plan {e} for {d}."],
         lambda r: {"id": r.randint(1, 9999)}, "The event {e} has the number {id}."),
    Tool(["light", "set_light", "switch_light"], "Switch the light of a room.",
         {"r": ("string", ["room", "where", "place"],
                lambda r: r.choice(words.ROOMS) if r.random() < 0.7 else r.choice(words.NOUNS)),
          "o": ("boolean", ["on", "state", "power"], _of([True, False]))},
         ["Turn the light in the {r} {o}.", "Switch {o} the light in the {r}.",
          "Light {o} in the {r}, please."],
         lambda r: {"status": r.choice(("ok", "done"))}, "The light in the {r} is {o}."),
    Tool(["read_file", "open_file", "cat", "get_file"], "Read a file.",
         {"p": ("string", ["path", "file", "filename"], _path)},
         ["Read the file {p}.", "What is in the file {p}?", "Open {p}.", "Show me {p}."],
         lambda r: {"text": words.thing(r)}, "The file says: {text}."),
    Tool(["get_user", "find_user", "user_info"], "Look up a user.",
         {"i": ("integer", ["id", "user_id", "number"], _int(1, 9999))},
         ["Who is user {i}?", "Look up user {i}.", "Get the user with the number {i}."],
         lambda r: {"name": words.name(r), "age": r.randint(18, 99)}, "User {i} is {name}, aged {age}."),
    Tool(["distance", "get_distance", "route"], "Distance between two cities.",
         {"f": ("string", ["from", "start", "origin"], words.city),
          "t": ("string", ["to", "end", "destination"], words.city)},
         ["How far is it from {f} to {t}?", "Distance from {f} to {t}?", "How far is {t} from {f}?"],
         lambda r: {"km": r.randint(20, 9999)}, "It is {km} km from {f} to {t}."),
    Tool(["order", "order_item", "buy"], "Order something.",
         {"i": ("string", ["item", "product", "what"], words.thing),
          "n": ("integer", ["quantity", "count", "amount"], _int(2, 50))},
         ["Order {n} of the {i}.", "Buy {n} of the {i}.", "I want {n} of the {i}."],
         lambda r: {"price": r.randint(1, 999)}, "I ordered {n} of the {i} for {price}."),
]  # fmt: skip


@dataclass
class Offer:
    """A tool as one dialogue offers it: with a name, parameter names and a schema chosen."""

    tool: Tool
    name: str
    slots: dict[str, str]
    schema: dict
    extras: dict[str, Any]  # optional parameters of the schema, each with a value it could take

    def call(self, values: dict) -> dict:
        """The arguments of a call, in the schema's order."""
        return {"name": self.name, "arguments": {self.slots.get(s, s): v for s, v in values.items()}}


_EXTRAS: dict[str, dict] = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "format": {"type": "string", "enum": ["short", "long"]},
    "language": {"type": "string", "enum": ["en", "de", "fr", "es"]},
    "limit": {"type": "integer"},
    "verbose": {"type": "boolean"},
    "priority": {"type": "string", "enum": ["low", "normal", "high"]},
    "note": {"type": "string"},
}
_HINTS = [
    "The city and state, e.g. San Francisco, CA", "The {x} to use", "Name of the {x}", "{x}", "A valid {x}.",
    "The {x}, as given by the user.", "Required. The {x}", "Which {x}? For example {w}.", "The {x} (see {w})",
]  # fmt: skip


def _other_name(rng: random.Random, name: str) -> str:
    """A tool's name as other people might write it."""
    form = rng.randrange(6)
    if form == 0:
        return rng.choice(("get_", "get_current_", "my_", "api_", "do_", "run_", "call_", "fetch_")) + name
    if form == 1:
        return name + rng.choice(("_tool", "_v2", "_now", "_api", "_service", "_function"))
    if form == 2:
        parts = name.split("_")
        return parts[0] + "".join(p.capitalize() for p in parts[1:])
    return name


def _widen(rng: random.Random, function: dict, extras: dict[str, Any]) -> dict:
    """Optional parameters, hints, and the keys and orders that schemas have elsewhere."""
    parameters = function["parameters"]
    properties = parameters["properties"]
    parameters["required"] = list(properties)
    for label in rng.sample(list(_EXTRAS), rng.choice((0, 1, 1, 2))):
        if label not in properties:
            properties[label] = dict(_EXTRAS[label])
            kind = _EXTRAS[label]["type"]
            extras[label] = rng.choice(_EXTRAS[label].get("enum") or [_VALUES[kind](rng)])
    if rng.random() < 0.6:
        for label, schema in properties.items():
            hint = rng.choice(_HINTS).format(x=label.replace("_", " "), w=words.thing(rng))
            schema["description"] = hint
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    if "description" in function and rng.random() < 0.5:
        about = function["description"].rstrip(".")
        lead = rng.choice(("Use this to: ", "This function can ", "", "", "Tool. "))
        tail = rng.choice(("", ".", " for the user.", f". {words.sentence(rng)}", " in a given place"))
        function["description"] = lead + about + tail
    if rng.random() < 0.15:
        function["strict"] = True
    if rng.random() < 0.3:
        function = {k: function[k] for k in rng.sample(list(function), len(function))}
    return function


def offer(rng: random.Random, tool: Tool, wide: bool = False) -> Offer:
    """Choose the names by which a dialogue knows a tool."""
    name = rng.choice(tool.names)
    slots: dict[str, str] = {}
    for slot, (_, names, _) in tool.params.items():
        slots[slot] = rng.choice([n for n in names if n not in slots.values()])
        if wide and rng.random() < 0.2:
            slots[slot] += rng.choice(("_name", "_value", "_text", "_arg", "_1"))
    if wide:
        name = _other_name(rng, name)
    properties: dict[str, dict] = {}
    described = rng.random() < 0.3
    for slot, (kind, _, _) in tool.params.items():
        properties[slots[slot]] = {"type": kind}
        if described:
            properties[slots[slot]]["description"] = f"The {slots[slot].replace('_', ' ')}."
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = list(properties)
    function: dict[str, Any] = {"name": name, "description": tool.about, "parameters": parameters}
    if rng.random() < 0.1:
        del function["description"]
    extras: dict[str, Any] = {}
    if wide:
        function = _widen(rng, function, extras)
    return Offer(tool, name, slots, {"type": "function", "function": function}, extras)


_VALUES: dict[str, Make] = {
    "string": words.thing,
    "integer": lambda r: r.randint(0, 9999),
    "boolean": lambda r: r.random() < 0.5,
}


def invented_tool(rng: random.Random) -> Tool:
    """A tool nobody has seen, asked for by its name: calling has to be general."""
    name = f"{words.invented(rng)}_{rng.choice(words.NOUNS)}"
    name = rng.choice((name, words.invented(rng), f"{rng.choice(words.VERBS)}_{words.invented(rng)}"))
    params = {}
    for i in range(rng.randint(1, 3)):
        kind = rng.choice(("string", "string", "integer", "boolean") if i else ("string", "integer"))
        label = rng.choice((words.invented(rng), rng.choice(words.NOUNS)))
        params[f"p{i}"] = (kind, [label, f"{label}_{i}"], _VALUES[kind])
    query = rng.choice(("Call {name} with {x}.", "Use the tool {name}: {x}", "Run {name} with {x}."))
    return Tool([name], f"{words.sentence(rng)}", params, [query],
                lambda r: {"result": words.thing(r)}, "The result is {result}.")  # fmt: skip


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _named(offered: Offer, values: dict) -> str:
    return ", ".join(f"{offered.slots[s]} = {dumps(v)}" for s, v in values.items())


def ask(rng: random.Random, offered: Offer, split: str) -> tuple[str, dict]:
    """A question for the offered tool, and the values that its call needs."""
    tool = offered.tool

    def make() -> tuple[str, dict[str, Any]]:
        return tool.about, {s: make(rng) for s, (_, _, make) in tool.params.items()}

    _, values = fresh(rng, split, make)
    shown = {s: _shown(v) for s, v in values.items()}
    by_name = rng.random() < 0.08
    form = "Call {name} with {x}." if by_name else rng.choice(tool.queries)
    question = form.format(name=offered.name, x=_named(offered, values), **shown)
    for label, value in offered.extras.items():
        if rng.random() < 0.35:
            more = rng.choice((" Set {k} to {v}.", " Use {k} {v}.", " ({k}: {v})", " With {k} = {v}."))
            question += more.format(k=label, v=_shown(value))
            values[label] = value
    return question, values


def call_message(offered: Offer, values: dict) -> dict:
    """The assistant's call."""
    return {"role": "assistant", "content": "", "tool_calls": [{"function": offered.call(values)}]}


def done(rng: random.Random, offered: Offer, values: dict) -> tuple[dict, str]:
    """The tool's result as a message, and the sentence that tells it."""
    if rng.random() < 0.04:
        reason = rng.choice(("not found", "no connection", "not allowed", "timeout"))
        return {"role": "tool", "content": dumps({"error": reason})}, f"That failed: {reason}."
    result = offered.tool.result(rng)
    shown = {s: _shown(v) for s, v in values.items()}
    answer = offered.tool.answer.format(**(shown | result))
    return {"role": "tool", "content": dumps(result)}, answer


def offers(rng: random.Random, count: int, wide: bool = False) -> list[Offer]:
    """Some tools with different names."""
    out: list[Offer] = []
    while len(out) < count:
        tool = invented_tool(rng) if rng.random() < 0.2 else rng.choice(TOOLS)
        new = offer(rng, tool, wide and rng.random() < 0.7)
        if all(new.tool.about != o.tool.about and new.name != o.name for o in out):
            out.append(new)
    return out


def _several(rng: random.Random, offered: list[Offer], split: str, rounds: int, wide: bool) -> list[dict]:
    """One question that needs several calls, one after the other, and one answer at the end."""
    received = [rng.choice(offered) for _ in range(rounds)]
    cities = [o for o in offered if list(o.tool.params) == ["c"]]
    if wide and cities and rng.random() < 0.3:
        received = [rng.choice(cities)] * rounds
    wants = [ask(rng, o, split) for o in received]
    link = rng.choice((" Then: ", " And then: ", "\n", " Also: "))
    text = link.join(q for q, _ in wants)
    same = (
        wide
        and rounds > 1
        and all(o is received[0] for o in received)
        and list(received[0].tool.params) == ["c"]
    )
    if same and not received[0].extras and rng.random() < 0.7:
        about = "the weather" if "Get the weather" in received[0].tool.about else "the time"
        places = [values["c"] for _, values in wants]
        text = f"What is {about} in {', '.join(places[:-1])} and in {places[-1]}?"
    messages = [user(text)]
    answers = []
    for offered_tool, (_, values) in zip(received, wants, strict=True):
        result, answer = done(rng, offered_tool, values)
        messages += [call_message(offered_tool, values), result]
        answers.append(answer)
    return [*messages, assistant(" ".join(answers))]


def tool(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """A tool call; in training also results, several rounds, and questions that need no tool."""
    offered = offers(rng, rng.randint(1, 4), reach > 1)
    schemas = [o.schema for o in offered]
    messages = []
    if rng.random() < 0.25:
        lead = rng.choice(("You are a helpful assistant.", "Use the tools.", "Be brief."))
        messages.append(system(lead))
    if split != TEST:
        rounds = rng.choice((0, 0, 1, 1, 1, 2, 2, 3))
        if rounds > 1:
            messages += _several(rng, offered, split, rounds, reach > 1)
        for _ in range(rounds == 1):
            chosen = rng.choice(offered)
            question, values = ask(rng, chosen, split)
            result, answer = done(rng, chosen, values)
            messages += [user(question), call_message(chosen, values), result, assistant(answer)]
    if rng.random() < 0.12:
        messages += rng.choice((add, sub, chat))(rng, split).messages
        if split != TEST and rng.random() < 0.3:
            return Example("tool", messages, messages[-1]["content"], tools=schemas)
    chosen = rng.choice(offered)
    question, values = ask(rng, chosen, split)
    messages += [user(question), call_message(chosen, values)]
    return Example("tool", messages, chosen.call(values), "json", tools=schemas)


def tool_rounds(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Two or three calls with their results, then the answer in words."""
    offered = offers(rng, rng.randint(1, 4), reach > 1)
    messages = _several(rng, offered, split, rng.randint(1, 3), reach > 1)
    answer = messages[-1]["content"]
    return Example("tool_rounds", messages, answer, tools=[o.schema for o in offered])
