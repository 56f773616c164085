// The official `openai` package, with its helpers for streams, tools and schemas.
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod';
import { City, MODEL, Person, WEATHER, serve } from './asked.mjs';

const WEATHER_TOOL = { name: 'weather', description: 'The weather in a city.', parameters: City };

async function chat(client, { stream, tools, schema, system, options }, talk) {
  const begin = system ? [{ role: 'system', content: system }] : [];
  const request = { model: MODEL, messages: [...begin, ...talk.history], ...options };
  if (schema) request.response_format = zodResponseFormat(Person, 'person');
  if (tools) request.tools = [zodFunction({ ...WEATHER_TOOL, function: () => WEATHER })];
  const calls = [];
  const pieces = [];
  const { completions } = client.chat;
  if (!stream && !tools) {
    const done = await (schema ? completions.parse(request) : completions.create(request));
    const { message } = done.choices[0];
    talk.history.push(message);
    const tokens = done.usage.total_tokens;
    return { text: message.content ?? '', pieces: 1, calls: message.tool_calls ?? [], value: message.parsed, tokens };
  }
  const runner = tools ? completions.runTools({ ...request, stream }) : completions.stream(request);
  runner.on('functionToolCall', (call) => calls.push([call.name, JSON.parse(call.arguments)]));
  if (stream) runner.on('content', (piece) => pieces.push(piece));
  const done = await runner.finalChatCompletion();
  const tokens = (await runner.totalUsage()).total_tokens;
  talk.history = runner.messages.slice(begin.length);
  const { message } = done.choices[0];
  if (stream && !calls.length && pieces.join('') !== message.content) throw new Error('text was lost');
  return { text: message.content ?? '', pieces: pieces.length || 1, calls, value: message.parsed, tokens };
}

async function responses(client, question, talk) {
  const { stream, tools, schema, chain, system, options } = question;
  const told = { text: '', pieces: 0, calls: [], tokens: 0 };
  for (;;) {
    const request = { model: MODEL, input: talk.history, ...options };
    if (system) request.instructions = system;
    if (chain && talk.last) request.previous_response_id = talk.last;
    if (schema) request.text = { format: zodTextFormat(Person, 'person') };
    if (tools) request.tools = [zodResponsesFunction(WEATHER_TOOL)];
    let done;
    if (stream) {
      const events = client.responses.stream(request);
      let text = '';
      events.on('response.output_text.delta', (event) => {
        text += event.delta;
        told.pieces += 1;
      });
      done = await events.finalResponse();
      if (text !== done.output_text) throw new Error('text was lost');
    } else {
      done = await client.responses[schema ? 'parse' : 'create'](request);
    }
    told.text += done.output_text;
    told.value = done.output_parsed;
    told.tokens += done.usage.total_tokens;
    talk.last = done.id;
    talk.history = chain ? [] : [...talk.history, ...done.output];
    const calls = done.output.filter((item) => item.type === 'function_call');
    if (!calls.length) return told;
    for (const { name, arguments: given, call_id } of calls) {
      told.calls.push([name, JSON.parse(given)]);
      talk.history.push({ type: 'function_call_output', call_id, output: WEATHER });
    }
  }
}

// What only this protocol has: a response is kept, can be read and followed again, and goes away.
async function keep(client) {
  const made = await client.responses.create({ model: MODEL, input: 'say hello' });
  const found = await client.responses.retrieve(made.id);
  const given = await client.responses.inputItems.list(made.id);
  const replay = client.responses.stream({ response_id: made.id });
  const followed = await replay.finalResponse();
  const deleted = await client.responses.delete(made.id);
  const after = await client.responses.retrieve(made.id).catch((error) => error.status);
  const models = await client.models.list();
  return {
    texts: [made, found, followed].map((response) => response.output_text),
    given: given.data.map((item) => item.content[0].text),
    deleted: deleted ?? null,
    after,
    models: models.data.map((model) => model.id),
  };
}

const ways = { chat, responses, keep };

await serve(
  (question, talk) => {
    const client = new OpenAI({ baseURL: question.url, apiKey: question.key });
    if (question.prompt) talk.history.push({ role: 'user', content: question.prompt });
    return ways[question.api](client, question, talk);
  },
  (error) => ({ status: error.status, message: String(error.message) }),
);
