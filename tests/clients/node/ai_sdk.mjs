// The Vercel AI SDK with three of its providers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { call, chat, collect, functions, look, main, pictures, question, structured, url, v1 } from "./common.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

const forecast = z.object({
  city: z.literal("Dublin"),
  day: z.object({ sky: z.literal("sunny"), warm: z.literal(true) }),
});

const tools = Object.fromEntries(
  functions.map(({ function: { name, description, parameters } }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters), execute: (input) => call(name, input) }),
  ]),
);

// `reasons`: whether the provider reads reasoning from this API.
function makeCases(model, reasons) {
  const see = async (colour) => {
    const content = [
      { type: "text", text: look },
      { type: "file", data: pictures[colour], mediaType: "image/png" },
    ];
    return (await generateText({ model, messages: [{ role: "user", content }] })).text;
  };
  return {
    chat: async () => (await generateText({ model, prompt: chat })).text,
    stream: () => collect(streamText({ model, prompt: chat }).textStream, (text) => text),
    tools: async () => {
      const result = streamText({ model, prompt: question, tools, stopWhen: stepCountIs(6) });
      await result.consumeStream();
      const steps = await result.steps;
      if (reasons && steps.filter((step) => step.reasoningText).length !== 3) throw new Error("the reasoning is lost");
      return result.text;
    },
    structured: async () =>
      (await generateText({ model, prompt: structured, output: Output.object({ schema: forecast }) })).output,
    images: () => Promise.all(["red", "blue"].map(see)),
  };
}

const options = { baseURL: v1, apiKey: "none" };
const compatible = createOpenAICompatible({ name: "local", ...options, supportsStructuredOutputs: true });
const openai = createOpenAI(options);
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });

await main({
  "openai-compatible": makeCases(compatible("m"), true),
  "openai responses": makeCases(openai("gpt-5"), false),
  "openai chat": makeCases(openai.chat("m"), false),
  anthropic: makeCases(anthropic("claude-m"), true),
});
