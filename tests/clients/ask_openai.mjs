// OpenAI's client for JavaScript: chats and responses, tools, forms, leaving, and what is refused.
//
//     cd .venv-peers/node && node --input-type=module - URL KEY < ../../tests/clients/ask_openai.mjs
//
// The server needs a chat template, and --tool-call-parser hermes.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Hello" }];
const ask = { model, messages, temperature: 0, max_completion_tokens: 90 };
const chats = client.chat.completions;

const whole = await chats.create(ask);
let said = "";
for await (const part of await chats.create({ ...ask, stream: true }))
  said += part.choices[0]?.delta.content ?? "";
assert.equal(said, whole.choices[0].message.content);

const Answer = z.strictObject({ color: z.enum(["red", "green"]), sure: z.boolean() });
const formed = await chats.parse({ ...ask, response_format: zodResponseFormat(Answer, "answer") });
assert.ok(Answer.parse(formed.choices[0].message.parsed));

const parameters = z.toJSONSchema(z.strictObject({ far: z.boolean() }));
const tools = [{ type: "function", function: { name: "look", parameters, strict: true } }];
const calling = { ...ask, tools, tool_choice: "required" };
const called = (await chats.create(calling)).choices[0];
assert.equal(called.finish_reason, "tool_calls");
const [call] = called.message.tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).far, "boolean");
const streamed = await chats.stream(calling).finalChatCompletion();
assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
const result = { role: "tool", tool_call_id: call.id, content: "a wall" };
const told = { ...ask, tools, tool_choice: "none", messages: [...messages, called.message, result] };
assert.ok((await chats.create(told)).choices[0].message.content);

const responses = client.responses;
const answered = await responses.create({ model, input: "Hello", temperature: 0, max_output_tokens: 20 });
said = "";
const events = { model, input: "Hello", temperature: 0, max_output_tokens: 20, stream: true };
for await (const event of await responses.create(events))
  if (event.type === "response.output_text.delta") said += event.delta;
assert.equal(said, answered.output_text);

// It leaves in the middle: by the stream, and by a signal.
const long = { ...ask, max_completion_tokens: 800, stream: true, ignore_eos: true };
for await (const part of await chats.create(long)) if (part.choices[0]?.delta.content) break;
const leaving = new AbortController();
const left = chats.create({ ...long, stream: false }, { signal: leaving.signal });
setTimeout(() => leaving.abort(), 100);
await assert.rejects(left, OpenAI.APIUserAbortError);

const refused = (kind, pattern, more) =>
  assert.rejects(chats.create({ ...ask, ...more }), (error) => {
    assert.ok(error instanceof kind, `${error}`);
    assert.match(error.message, pattern);
    return Boolean(error.requestID);
  });
const image = { type: "image_url", image_url: { url: "data:image/png;base64,AA==" } };
await refused(OpenAI.BadRequestError, /image/, { messages: [{ role: "user", content: [image] }] });
const endless = [{ role: "user", content: "word ".repeat(5_000) }];
await refused(OpenAI.BadRequestError, /1024|1,024/, { messages: endless });
await refused(OpenAI.NotFoundError, /other/, { model: "other" });
console.log("openai for JavaScript: chats, tools, forms, responses, leaving, refusals");
