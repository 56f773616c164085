// The packages `@langchain/openai` and `langchain`: the model itself, and an agent that runs the client's tools.
import { AIMessageChunk, HumanMessage, SystemMessage, ToolMessage } from '@langchain/core/messages';
import { tool } from '@langchain/core/tools';
import { ChatOpenAI } from '@langchain/openai';
import { createAgent } from 'langchain';
import { City, MODEL, PICTURE, Person, WEATHER, serve } from './asked.mjs';

const described = { name: 'weather', description: 'The weather in a city.', schema: City };
const weather = tool(() => WEATHER, described);
const pictured = tool(
  () => [
    { type: 'text', text: WEATHER },
    { type: 'image_url', image_url: { url: `data:image/png;base64,${PICTURE}` } },
  ],
  described,
);

function modelOf({ url, key, api, options }) {
  return new ChatOpenAI({
    model: MODEL,
    apiKey: key,
    configuration: { baseURL: url },
    useResponsesApi: api === 'responses',
    // A refusal would be asked again after seconds, whatever the server says of it.
    maxRetries: 0,
    ...options,
  });
}

function asked({ prompt, image }) {
  if (!image) return new HumanMessage(prompt);
  return new HumanMessage({ content: [{ type: 'text', text: prompt }, { type: 'image_url', image_url: { url: image } }] });
}

async function collect(stream, told) {
  let whole;
  let text = '';
  for await (const chunk of stream) {
    whole = whole ? whole.concat(chunk) : chunk;
    if (chunk.text) told.pieces += 1;
    text += chunk.text;
  }
  if (text !== whole.text) throw new Error('text was lost');
  return whole;
}

async function answer(question, talk) {
  const { stream, tools, schema, chain, system, picture } = question;
  const told = { text: '', pieces: 0, calls: [], tokens: 0 };
  let model = modelOf(question);
  // Without a question what was to be sent last is sent again.
  if (question.prompt) talk.history.push(asked(question));
  if (schema) {
    const structured = model.withStructuredOutput(Person);
    if (!stream) return { ...told, value: await structured.invoke(talk.history) };
    for await (const value of await structured.stream(talk.history)) told.value = value;
    return told;
  }
  const own = picture ? pictured : weather;
  if (tools) model = model.bindTools([own]);
  for (;;) {
    const given = [...(system ? [new SystemMessage(system)] : []), ...talk.history];
    const options = chain && talk.last ? { previous_response_id: talk.last } : {};
    const message = stream ? await collect(await model.stream(given, options), told) : await model.invoke(given, options);
    if (message.invalid_tool_calls?.length) throw new Error('a call was not understood');
    told.text += message.text;
    told.tokens += message.usage_metadata.total_tokens;
    talk.last = message.response_metadata.id ?? message.id;
    talk.history = chain ? [] : [...talk.history, message];
    for (const call of message.tool_calls ?? []) {
      told.calls.push([call.name, call.args]);
      talk.history.push(await own.invoke(call));
    }
    if (!message.tool_calls?.length) return told;
  }
}

// The loop is the library's, and so is what it keeps of the conversation.
async function agent(question, talk) {
  const { stream, tools } = question;
  const made = createAgent({ model: modelOf({ ...question, api: question.through }), tools: tools ? [weather] : [] });
  const before = [...talk.history, asked(question)];
  let done;
  let streamed = '';
  if (stream) {
    for await (const [mode, part] of await made.stream({ messages: before }, { streamMode: ['messages', 'values'] })) {
      if (mode === 'values') done = part;
      else if (AIMessageChunk.isInstance(part[0])) streamed += part[0].text;
    }
  } else {
    done = await made.invoke({ messages: before });
  }
  talk.history = done.messages;
  const fresh = done.messages.slice(before.length);
  const calls = fresh.flatMap((message) => message.tool_calls ?? []).map((call) => [call.name, call.args]);
  const results = fresh.filter((message) => ToolMessage.isInstance(message)).length;
  return { text: fresh.at(-1).text, streamed, calls, results, pieces: 1, tokens: 0 };
}

await serve(
  (question, talk) => (question.api === 'agent' ? agent : answer)(question, talk),
  (error) => ({ status: error.status, message: String(error.message) }),
);
