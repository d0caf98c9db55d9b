// OpenAI's own package for Node: chat/completions with its runner of tools, and responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { call, chat, collect, functions, look, main, pictures, question, structured, v1 } from "./common.mjs";

const client = new OpenAI({ baseURL: v1, apiKey: "none", maxRetries: 0 });
const forecast = z.object({
  city: z.literal("Dublin"),
  day: z.object({ sky: z.literal("sunny"), warm: z.literal(true) }),
});

const ask = (content, more = {}) =>
  client.chat.completions.create({ model: "m", messages: [{ role: "user", content }], ...more });
const respond = (input, more = {}) => client.responses.create({ model: "m", input, ...more });

const chatCases = {
  chat: async () => (await ask(chat)).choices[0].message.content,
  stream: async () => collect(await ask(chat, { stream: true }), (chunk) => chunk.choices[0]?.delta.content),
  tools: () =>
    client.chat.completions
      .runTools({
        model: "m",
        stream: true,
        messages: [{ role: "user", content: question }],
        tools: functions.map((one) => ({
          type: "function",
          function: { ...one.function, parse: JSON.parse, function: (input) => call(one.function.name, input) },
        })),
      })
      .finalContent(),
  structured: async () =>
    (
      await client.chat.completions.parse({
        model: "m",
        messages: [{ role: "user", content: structured }],
        response_format: zodResponseFormat(forecast, "forecast"),
      })
    ).choices[0].message.parsed,
  images: () =>
    Promise.all(
      ["red", "blue"].map(async (colour) => {
        const image = { type: "image_url", image_url: { url: pictures[colour], detail: "low" } };
        return (await ask([{ type: "text", text: look }, image])).choices[0].message.content;
      }),
    ),
};

const responseCases = {
  chat: async () => (await respond(chat)).output_text,
  stream: async () =>
    collect(await respond(chat, { stream: true }), (event) => event.type === "response.output_text.delta" && event.delta),
  tools: async () => {
    const tools = functions.map((one) => ({ type: "function", ...one.function, strict: true }));
    const input = [{ role: "user", content: question }];
    for (;;) {
      const response = await respond(input, { tools });
      const calls = response.output.filter((item) => item.type === "function_call");
      if (calls.length === 0) return response.output_text;
      input.push(...response.output);
      for (const { call_id, name, arguments: text } of calls)
        input.push({ type: "function_call_output", call_id, output: call(name, JSON.parse(text)) });
    }
  },
  structured: async () =>
    (await client.responses.parse({ model: "m", input: structured, text: { format: zodTextFormat(forecast, "forecast") } }))
      .output_parsed,
  images: () =>
    Promise.all(
      ["red", "blue"].map(async (colour) => {
        const image = { type: "input_image", image_url: pictures[colour], detail: "low" };
        return (await respond([{ role: "user", content: [{ type: "input_text", text: look }, image] }])).output_text;
      }),
    ),
};

await main({ chat: chatCases, responses: responseCases });
