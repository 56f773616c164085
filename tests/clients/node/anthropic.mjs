// The official `@anthropic-ai/sdk` package, with its helpers for streams and schemas.
import Anthropic from '@anthropic-ai/sdk';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { MODEL, Person, WEATHER, serve } from './asked.mjs';

const WEATHER_TOOL = {
  name: 'weather',
  description: 'The weather in a city.',
  input_schema: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
};

async function messages(client, { stream, tools, schema, system, options }, talk) {
  const told = { text: '', pieces: 0, calls: [], tokens: 0 };
  for (;;) {
    const request = { model: MODEL, max_tokens: 1000, messages: talk.history, ...options };
    if (system) request.system = system;
    if (tools) request.tools = [WEATHER_TOOL];
    if (schema) request.output_config = { format: zodOutputFormat(Person) };
    let done;
    if (stream) {
      const events = client.messages.stream(request);
      let text = '';
      events.on('text', (piece) => {
        text += piece;
        told.pieces += 1;
      });
      done = await events.finalMessage();
      if (text !== textOf(done)) throw new Error('text was lost');
    } else {
      done = await client.messages[schema ? 'parse' : 'create'](request);
      told.pieces += 1;
    }
    told.text += textOf(done);
    told.value = done.parsed_output;
    told.tokens += done.usage.input_tokens + done.usage.output_tokens;
    talk.history.push({ role: 'assistant', content: done.content });
    const calls = done.content.filter((block) => block.type === 'tool_use');
    if (done.stop_reason !== (calls.length ? 'tool_use' : 'end_turn')) throw new Error(done.stop_reason);
    if (!calls.length) return told;
    const results = calls.map(({ id, name, input }) => {
      told.calls.push([name, input]);
      return { type: 'tool_result', tool_use_id: id, content: WEATHER };
    });
    talk.history.push({ role: 'user', content: results });
  }
}

function textOf(message) {
  return message.content.map((block) => (block.type === 'text' ? block.text : '')).join('');
}

await serve(
  (question, talk) => {
    const client = new Anthropic({ baseURL: question.url.replace(/\/v1$/, ''), apiKey: question.key });
    talk.history.push({ role: 'user', content: question.prompt });
    return messages(client, question, talk);
  },
  (error) => ({ status: error.status === 200 ? null : error.status, message: String(error.message) }),
);
