// The AI SDK, over what is compatible with OpenAI's: texts, tools, objects, leaving, refusals.
//
//     cd .venv-peers/node && node --input-type=module - URL KEY < ../../tests/clients/ask_ai_sdk.mjs
//
// The server needs a chat template, and --tool-call-parser hermes.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const own = { name: "quire", baseURL: `${url}/v1`, apiKey, supportsStructuredOutputs: true };
const provider = createOpenAICompatible({ ...own, includeUsage: true });
const model = provider("demo");
const ask = { model, prompt: "Hello", temperature: 0, maxOutputTokens: 90, maxRetries: 0 };

const whole = await generateText({ ...ask, instructions: "Be short." });
const parts = streamText({ ...ask, instructions: "Be short." });
let said = "";
for await (const part of parts.textStream) said += part;
assert.equal(said, whole.text);
assert.equal((await parts.usage).outputTokens, whole.usage.outputTokens);

const schema = z.strictObject({ color: z.enum(["red", "green"]), sure: z.boolean() });
const output = Output.object({ schema });
const formed = await generateText({ ...ask, output });
assert.ok(schema.parse(formed.output));
assert.deepEqual(await streamText({ ...ask, output }).output, formed.output);

const look = tool({
  description: "Look around.",
  inputSchema: z.strictObject({ far: z.boolean() }),
  execute: async ({ far }) => (far ? "a hill" : "a wall"),
});
const calling = { ...ask, tools: { look }, toolChoice: "required" };
const called = await generateText(calling);
assert.equal(called.finishReason, "tool-calls");
assert.ok(["a hill", "a wall"].includes(called.toolResults[0].output));
const streamed = await streamText(calling).toolCalls;
assert.deepEqual(streamed[0].input, called.toolCalls[0].input);
const told = [{ role: "user", content: "Hello" }, ...called.response.messages];
const { prompt, ...rest } = ask;
assert.ok((await generateText({ ...rest, messages: told })).text);

const leaving = new AbortController();
const long = { ...ask, maxOutputTokens: 800, abortSignal: leaving.signal };
setTimeout(() => leaving.abort(), 100);
await assert.rejects(generateText(long), { name: "AbortError" });

const refused = (pattern, more) =>
  assert.rejects(generateText({ ...rest, ...more }), (error) => {
    assert.ok(APICallError.isInstance(error), `${error}`);
    assert.match(error.message, pattern);
    return true;
  });
const image = { type: "file", mediaType: "image/png", data: new Uint8Array(2) };
await refused(/image/, { messages: [{ role: "user", content: [image] }] });
await refused(/1024|1,024/, { prompt: "word ".repeat(5_000) });
await refused(/other/, { model: provider("other"), prompt });
console.log("AI SDK: texts, objects, tools, leaving, refusals");
