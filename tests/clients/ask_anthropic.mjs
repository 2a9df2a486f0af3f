// Anthropic's client for JavaScript: messages, streams, tools, leaving, and what is refused.
//
//     cd .venv-peers/node && node --input-type=module - URL KEY < ../../tests/clients/ask_anthropic.mjs
//
// The server needs a chat template, and --tool-call-parser hermes.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [url, apiKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Hello" }];
const ask = { model, messages, max_tokens: 90, temperature: 0, system: "Be short." };

const whole = await client.messages.create(ask);
const stream = client.messages.stream(ask);
let said = "";
stream.on("text", (text) => (said += text));
assert.deepEqual((await stream.finalMessage()).content, whole.content);
assert.equal(said, whole.content[0].text);
const counted = await client.messages.countTokens({ model, messages, system: "Be short." });
const { input_tokens, cache_read_input_tokens } = whole.usage;
assert.equal(counted.input_tokens, input_tokens + cache_read_input_tokens);

const far = { type: "object", properties: { far: { type: "boolean" } }, required: ["far"] };
const tools = [{ name: "look", description: "Look around.", input_schema: far }];
const calling = { ...ask, tools, tool_choice: { type: "any" } };
const called = await client.messages.create(calling);
assert.equal(called.stop_reason, "tool_use");
const use = called.content.find((block) => block.type === "tool_use");
assert.equal(typeof use.input.far, "boolean");
const streamed = await client.messages.stream(calling).finalMessage();
assert.deepEqual(streamed.content.find((block) => block.type === "tool_use").input, use.input);
const result = { type: "tool_result", tool_use_id: use.id, content: "a wall" };
const told = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
assert.ok(await client.messages.create({ ...calling, messages: told, tool_choice: { type: "none" } }));

const long = client.messages.stream({ ...ask, max_tokens: 800 });
long.on("text", () => long.abort());
await assert.rejects(long.finalMessage(), Anthropic.APIUserAbortError);

const refused = (kind, pattern, more) =>
  assert.rejects(client.messages.create({ ...ask, ...more }), (error) => {
    assert.ok(error instanceof kind, `${error}`);
    assert.match(error.message, pattern);
    return Boolean(error.requestID);
  });
const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "AA==" } };
await refused(Anthropic.BadRequestError, /image/, { messages: [{ role: "user", content: [image] }] });
const endless = [{ role: "user", content: "word ".repeat(5_000) }];
await refused(Anthropic.BadRequestError, /1024|1,024/, { messages: endless });
await refused(Anthropic.NotFoundError, /other/, { model: "other" });
console.log("anthropic for JavaScript: messages, streams, tools, leaving, refusals");
