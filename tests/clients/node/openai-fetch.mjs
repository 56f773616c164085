// The package `openai-fetch`: the requests and chunks of the protocol as they are, the loop is its user's.
import { OpenAIClient } from 'openai-fetch';
import { z } from 'zod';
import { City, MODEL, Person, WEATHER, serve } from './asked.mjs';

const WEATHER_TOOL = {
  type: 'function',
  function: { name: 'weather', description: 'The weather in a city.', parameters: z.toJSONSchema(City), strict: true },
};

// A message from its chunks, as any user of the package puts it together: each chunk has a choice, or is an error.
async function collect(chunks, told) {
  const message = { role: 'assistant', content: '' };
  let usage;
  for await (const chunk of chunks) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) usage = chunk.usage;
    const { delta } = chunk.choices[0];
    if (delta.content) {
      told.pieces += 1;
      message.content += delta.content;
    }
    for (const piece of delta.tool_calls ?? []) {
      message.tool_calls ??= [];
      const call = (message.tool_calls[piece.index] ??= { ...piece, function: { ...piece.function, arguments: '' } });
      call.function.arguments += piece.function.arguments;
    }
  }
  return { message, usage };
}

async function answer({ url, key, prompt, image, stream, tools, schema, system, options }, talk) {
  const client = new OpenAIClient({ baseUrl: url, apiKey: key });
  const told = { text: '', pieces: 0, calls: [], tokens: 0 };
  const begin = system ? [{ role: 'system', content: system }] : [];
  const content = image ? [{ type: 'text', text: prompt }, { type: 'image_url', image_url: { url: image } }] : prompt;
  // Without a question what was to be sent last is sent again.
  if (prompt) talk.history.push({ role: 'user', content });
  for (;;) {
    const request = { model: MODEL, messages: [...begin, ...talk.history], ...options };
    if (tools) request.tools = [WEATHER_TOOL];
    if (schema)
      request.response_format = {
        type: 'json_schema',
        json_schema: { name: 'person', strict: true, schema: z.toJSONSchema(Person) },
      };
    let done;
    if (stream) {
      done = await collect(await client.streamChatCompletion(request), told);
    } else {
      const made = await client.createChatCompletion(request);
      done = { message: made.choices[0].message, usage: made.usage };
    }
    const { message, usage } = done;
    talk.history.push(message);
    told.text += message.content ?? '';
    told.tokens += usage.total_tokens;
    for (const call of message.tool_calls ?? []) {
      told.calls.push([call.function.name, JSON.parse(call.function.arguments)]);
      talk.history.push({ role: 'tool', tool_call_id: call.id, content: WEATHER });
    }
    if (message.tool_calls?.length) continue;
    if (schema) told.value = JSON.parse(told.text);
    return told;
  }
}

await serve(answer, (error) => ({ status: error.status, message: String(error.message) }));
