// What OpenAI's and Anthropic's packages for Node make of a server; printed as JSON.
const OpenAI = require("openai");
const Anthropic = require("@anthropic-ai/sdk");

const [, , url, question] = process.argv;
const given = JSON.parse(question);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const chat = { model: "smelt-6m", messages: given.messages, max_tokens: 16, temperature: 0 };

async function streamedCompletion() {
  let text = "";
  let usage = null;
  const body = { model: "smelt-6m", prompt: given.prompt, max_tokens: 16, temperature: 0, stream: true };
  for await (const chunk of await openai.completions.create({ ...body, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

async function calledTool() {
  const stream = openai.chat.completions.stream({
    ...chat, max_tokens: 200, tools: [given.tool], tool_choice: "required", parallel_tool_calls: false,
  });
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  return { calls: message.tool_calls, finish_reason };
}

async function chosenTool() {
  const { function: tool } = given.tool;
  const stream = anthropic.messages.stream({
    model: "smelt-6m", max_tokens: 200, messages: given.messages.slice(-1), temperature: 0,
    tools: [{ name: tool.name, input_schema: tool.parameters }],
    tool_choice: { type: "tool", name: tool.name, disable_parallel_tool_use: true },
  });
  const { content, stop_reason } = await stream.finalMessage();
  return { content, stop_reason };
}

async function respondedStream() {
  const stream = openai.responses.stream({
    model: "smelt-6m", input: given.messages, max_output_tokens: 16, temperature: 0, store: false,
  });
  return (await stream.finalResponse()).output_text;
}

async function listed(pages) {
  const found = [];
  for await (const model of pages) found.push(model.id);
  return found;
}

async function refusal(send) {
  try {
    await send();
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, message: error.message };
  }
}

async function main() {
  const long = "word ".repeat(20000);
  const streamed = await openai.chat.completions.stream(chat).finalChatCompletion();
  const message = { model: "smelt-6m", max_tokens: 16, temperature: 0, messages: given.messages.slice(-1) };
  console.log(JSON.stringify({
    completion: await streamedCompletion(),
    whole: (await openai.chat.completions.create(chat)).choices[0].message.content,
    streamed: streamed.choices[0].message.content,
    tool: await calledTool(),
    chosen: await chosenTool(),
    response: await respondedStream(),
    message: (await anthropic.messages.create(message)).content[0].text,
    counted: (await anthropic.messages.countTokens({ model: "smelt-6m", messages: message.messages })).input_tokens,
    embedding: (await openai.embeddings.create({ model: "smelt-6m", input: given.prompt })).data[0].embedding,
    models: [await listed(openai.models.list()), await listed(anthropic.models.list())],
    too_long: await refusal(() => openai.completions.create({ model: "smelt-6m", prompt: long })),
    too_long_message: await refusal(() =>
      anthropic.messages.create({ ...message, messages: [{ role: "user", content: long }] })),
    unknown: await refusal(() => openai.chat.completions.create({ ...chat, model: "other" })),
  }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
