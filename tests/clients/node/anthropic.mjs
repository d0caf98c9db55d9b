// Anthropic's own package for Node, with its runner of tools.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { call, chat, collect, functions, look, main, pictures, question, structured, url } from "./common.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const forecast = z.object({
  city: z.literal("Dublin"),
  day: z.object({ sky: z.literal("sunny"), warm: z.literal(true) }),
});
const ask = (content, more = {}) =>
  client.messages.create({ model: "m", max_tokens: 200, messages: [{ role: "user", content }], ...more });

await main({
  messages: {
    chat: async () => (await ask(chat)).content[0].text,
    stream: async () => collect(await ask(chat, { stream: true }), (event) => event.delta?.text),
    tools: async () => {
      const message = await client.beta.messages.toolRunner({
        model: "m",
        max_tokens: 2048,
        stream: false,
        tools: functions.map(({ function: { name, description, parameters } }) =>
          betaTool({ name, description, inputSchema: parameters, run: (input) => call(name, input) }),
        ),
        messages: [{ role: "user", content: question }],
      });
      return message.content.at(-1).text;
    },
    structured: async () =>
      (
        await client.messages.parse({
          model: "m",
          max_tokens: 200,
          messages: [{ role: "user", content: structured }],
          output_config: { format: zodOutputFormat(forecast) },
        })
      ).parsed_output,
    images: () =>
      Promise.all(
        ["red", "blue"].map(async (colour) => {
          const source = { type: "base64", media_type: "image/png", data: pictures[colour].split(",")[1] };
          return (await ask([{ type: "image", source }, { type: "text", text: look }])).content[0].text;
        }),
      ),
  },
});
