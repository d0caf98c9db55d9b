"""DSPy: a signature's answer, an agent that calls tools in DSPy's own format, and JSON by a response
format."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["DSPY_CACHEDIR"] = tempfile.mkdtemp()

import dspy  # noqa: E402
from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class  # noqa: E402


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.model = dspy.LM(
            "openai/m", api_base=server.v1, api_key="none", cache=False, max_tokens=200, temperature=0
        )
        dspy.configure(lm=self.model)

    def chat(self) -> Any:
        return dspy.Predict("question -> answer")(question=CHAT).answer

    async def stream(self) -> Any:
        """DSPy holds ten tokens back to find its own end mark, which has more of a small vocabulary."""
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        predict = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
        chunks = [chunk async for chunk in predict(question=CHAT)]
        parts = [chunk.chunk for chunk in chunks if isinstance(chunk, dspy.streaming.StreamResponse)]
        return ["".join(parts).partition("[[ ##")[0].strip()]

    def tools(self) -> Any:
        return dspy.ReAct("question -> answer", tools=list(TOOLS))(question=QUESTION).answer

    def structured(self) -> Any:
        signature = dspy.Signature(
            {"question": (str, dspy.InputField()), "forecast": (make_forecast_class(), dspy.OutputField())}
        )
        with dspy.context(adapter=dspy.JSONAdapter()):
            return dspy.Predict(signature)(question=STRUCTURED).forecast.model_dump()

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        content = dspy.Image(self.server.pictures[colour]).format()
        return self.model(messages=[{"role": "user", "content": [{"type": "text", "text": LOOK}, *content]}])[
            0
        ]


main(chat=Chat)
