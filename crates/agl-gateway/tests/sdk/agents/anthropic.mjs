// Messages through npm's `@anthropic-ai/sdk`: `anthropic.mjs [stream]`.
import Anthropic from "@anthropic-ai/sdk";
import { QUESTION, SYSTEM, SCHEMA, multiply, answer } from "./task.mjs";

const stream = process.argv[2];
const client = new Anthropic();
const messages = [{ role: "user", content: QUESTION }];
const tools = [{ name: "multiply", description: "Multiplies two numbers.", input_schema: SCHEMA }];
for (;;) {
  const request = { model: "claude-sonnet-4-5", max_tokens: 1000, system: SYSTEM, messages, tools };
  const message = stream ? await client.messages.stream(request).finalMessage() : await client.messages.create(request);
  const calls = message.content.filter((block) => block.type === "tool_use");
  if (!calls.length) {
    answer(message.content.at(-1).text);
    break;
  }
  messages.push({ role: "assistant", content: message.content });
  messages.push({ role: "user", content: calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: multiply(call.input) })) });
}
