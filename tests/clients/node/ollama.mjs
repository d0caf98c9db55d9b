// Ollama's own package for Node.
import { Ollama } from "ollama";
import { call, chat, collect, functions, look, main, pictures, question, structured, url } from "./common.mjs";

const client = new Ollama({ host: url });
const ask = (message, more = {}) =>
  client.chat({ model: "m", messages: [{ role: "user", ...message }], ...more });
const forecast = {
  type: "object",
  properties: {
    city: { const: "Dublin" },
    day: {
      type: "object",
      properties: { sky: { const: "sunny" }, warm: { const: true } },
      required: ["sky", "warm"],
    },
  },
  required: ["city", "day"],
};

await main({
  chat: {
    chat: async () => {
      const { models } = await client.list();
      const shown = await client.show({ model: models[0].name });
      const { version } = await client.version();
      if (!shown.capabilities.includes("tools") || !version) throw new Error(JSON.stringify(shown));
      const pulled = await client.pull({ model: "m" }).catch((error) => error.message);
      if (!pulled.includes("not supported")) throw new Error(pulled);
      return (await ask({ content: chat }, { options: { num_predict: 200 } })).message.content;
    },
    stream: async () => collect(await ask({ content: chat }, { stream: true }), (part) => part.message.content),
    tools: async () => {
      const messages = [{ role: "user", content: question }];
      for (;;) {
        const { message } = await client.chat({ model: "m", messages, tools: functions, think: true });
        messages.push(message);
        if (!message.tool_calls) return message.content;
        for (const { function: called } of message.tool_calls) {
          const content = call(called.name, called.arguments);
          messages.push({ role: "tool", content, tool_name: called.name });
        }
      }
    },
    structured: async () => JSON.parse((await ask({ content: structured }, { format: forecast })).message.content),
    images: () =>
      Promise.all(
        ["red", "blue"].map(
          async (colour) => (await ask({ content: look, images: [pictures[colour].split(",")[1]] })).message.content,
        ),
      ),
  },
});
