// Chat completions and Responses through npm's `openai`: `openai.mjs chat|responses [stream]`.
import OpenAI from "openai";
import { QUESTION, SYSTEM, SCHEMA, multiply, answer } from "./task.mjs";

const [kind, stream] = process.argv.slice(2);
const client = new OpenAI();
const definition = { name: "multiply", description: "Multiplies two numbers.", parameters: SCHEMA };

async function chat() {
  const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: QUESTION }];
  for (;;) {
    const request = { model: "gpt-4o", messages, tools: [{ type: "function", function: definition }] };
    const completion = stream
      ? await client.chat.completions.stream(request).finalChatCompletion()
      : await client.chat.completions.create(request);
    const { content, tool_calls } = completion.choices[0].message;
    if (!tool_calls?.length) return content;
    const calls = tool_calls.map(({ id, type, function: { name, arguments: text } }) => ({ id, type, function: { name, arguments: text } }));
    messages.push({ role: "assistant", content, tool_calls: calls });
    for (const call of calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: multiply(JSON.parse(call.function.arguments)) });
    }
  }
}

async function responses() {
  const input = [{ role: "user", content: QUESTION }];
  for (;;) {
    const request = { model: "gpt-4o", instructions: SYSTEM, input, store: false, tools: [{ type: "function", strict: false, ...definition }] };
    const response = stream ? await client.responses.stream(request).finalResponse() : await client.responses.create(request);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    for (const { parsed_arguments, ...item } of response.output) input.push(item);
    for (const call of calls) {
      input.push({ type: "function_call_output", call_id: call.call_id, output: multiply(JSON.parse(call.arguments)) });
    }
  }
}

answer(await { chat, responses }[kind]());
