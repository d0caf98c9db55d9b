// What the scripts for Node share; the questions, the tools and their results are those of scripts/common.py.
import { readFileSync } from "node:fs";

export const given = JSON.parse(readFileSync(process.argv[2], "utf8"));
export const { url, pictures, asked } = given;
export const v1 = `${url}/v1`;
export const { chat, question, structured, look, results, functions } = asked;

let called = [];

// Notes a call. Returns the tool's result.
export function call(name, input) {
  called.push([name, input]);
  return results[name];
}

export async function collect(stream, read) {
  const found = [];
  for await (const part of stream) {
    const text = read(part);
    if (text) found.push(text);
  }
  return found;
}

// Runs all cases of all variants and prints what each has found, as its last line.
export async function main(variants) {
  const out = {};
  for (const [variant, cases] of Object.entries(variants)) {
    out[variant] = {};
    for (const name of Object.keys(cases)) {
      called = [];
      try {
        const found = await cases[name]();
        out[variant][name] = { found: name === "tools" ? { calls: called, answer: found } : found };
      } catch (error) {
        out[variant][name] = { error: `${error.stack}\n${error.responseBody ?? ""}` };
      }
    }
  }
  process.stdout.write(`\n${JSON.stringify(out)}\n`, () => process.exit(0));
}
