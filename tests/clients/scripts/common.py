"""What the scripts of all client libraries share: what is asked, the tools, and how results are printed.

A script runs in the environment of its library, so nothing here imports more than Python's own modules. It
gets the name of a JSON file with the server's URL and pictures, and prints as its last line what each case
has found.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import gc
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

STUCK = 300.0  # seconds after which a script is taken to hang; later, the test kills it
CASES = ("chat", "stream", "tools", "structured", "images")

CHAT = "What is 12 + 30?"
QUESTION = "What is the weather in Dublin?\nMultiply 12 by 7.\nSet a timer for 5 minutes."
CALLS = [["get_weather", {"city": "Dublin"}], ["multiply", {"a": 12, "b": 7}], ["set_timer", {"minutes": 5}]]
RESULTS = {
    "get_weather": '{"temperature": 21, "sky": "sunny"}',
    "multiply": '{"result": 84}',
    "set_timer": '{"ends": "12:30"}',
}
ANSWER = "It is 21 degrees and sunny in Dublin. The result is 84. The timer ends at 12:30."
STRUCTURED = "Describe the weather in Dublin."
FORECAST = {"city": "Dublin", "day": {"sky": "sunny", "warm": True}}
LOOK = "What colour is the circle?"

CALLED: list[list[Any]] = []  # the calls of the tools below, since the last case began


def record(name: str, **arguments: Any) -> str:
    """Notes a call. Returns the tool's result."""
    CALLED.append([name, arguments])
    return RESULTS[name]


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The name of the city.
    """
    return record("get_weather", city=city)


def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return record("multiply", a=a, b=b)


def set_timer(minutes: int) -> str:
    """Start a timer.

    Args:
        minutes: How many minutes it runs.
    """
    return record("set_timer", minutes=minutes)


TOOLS = (get_weather, multiply, set_timer)
RUN = {tool.__name__: tool for tool in TOOLS}
PARAMETERS: dict[str, dict[str, str]] = {
    "get_weather": {"city": "string"},
    "multiply": {"a": "integer", "b": "integer"},
    "set_timer": {"minutes": "integer"},
}


def make_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a tool's parameters, closed."""
    properties = {key: {"type": kind} for key, kind in PARAMETERS[name].items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def describe(name: str) -> str:
    return (RUN[name].__doc__ or "").partition("\n")[0]


FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": name, "description": describe(name), "parameters": make_schema(name)},
    }
    for name in RUN
]


def make_forecast_class() -> Any:
    """A pydantic model that allows one value only, so that any model's answer is known."""
    from pydantic import BaseModel

    class Day(BaseModel):
        sky: Literal["sunny"]
        warm: Literal[True]

    class Forecast(BaseModel):
        """A weather forecast."""

        city: Literal["Dublin"]
        day: Day

    return Forecast


@dataclass
class Server:
    """The server to talk to, and pictures of a circle."""

    url: str
    pictures: Mapping[str, str]  # colour: data URL

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def get_base64(self, colour: str) -> str:
        return self.pictures[colour].partition(",")[2]

    def get_png(self, colour: str) -> bytes:
        return base64.b64decode(self.get_base64(colour))


def run_case(made: Any, name: str) -> dict[str, Any]:
    """What a case found, or the error that it ended with; nothing if there is no such case."""
    method = getattr(made, name, None)
    if method is None:
        return {}
    CALLED.clear()
    try:
        found = method()
        if inspect.isawaitable(found):
            found = asyncio.run(found)
        return {"found": {"calls": list(CALLED), "answer": found} if name == "tools" else found}
    except BaseException:
        return {"error": traceback.format_exc()}


def main(**variants: Any) -> None:
    """Run all cases of each variant, a class that is made with the server. If that hangs, stderr says
    where."""
    faulthandler.dump_traceback_later(STUCK)
    # LiteLLM leaves streams of Messages before their end. A collection that closes one while httpcore holds
    # the lock of its connection pool waits for that lock for ever.
    gc.disable()
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    server = Server(given["url"], given["pictures"])
    wanted = sys.argv[2:] or CASES
    results: dict[str, Any] = {}
    for variant, make in variants.items():
        made = make(server)
        results[variant] = {name: run_case(made, name) for name in wanted}
    sys.stdout.flush()
    print(f"\n{json.dumps(results)}", flush=True)
    os._exit(0)  # threads of libraries that send telemetry must not keep the process
