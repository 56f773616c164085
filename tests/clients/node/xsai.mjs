// The packages of `xsai`: `fetch`, and no more of the protocol than they need.
import { generateText } from '@xsai/generate-text';
import { streamText } from '@xsai/stream-text';
import { tool } from '@xsai/tool';
import { z } from 'zod';
import { City, MODEL, PICTURE, Person, WEATHER, serve } from './asked.mjs';

const described = { name: 'weather', description: 'The weather in a city.', parameters: City };
const weather = await tool({ ...described, execute: () => WEATHER });
const pictured = await tool({
  ...described,
  execute: () => [
    { type: 'text', text: WEATHER },
    { type: 'image_url', image_url: { url: `data:image/png;base64,${PICTURE}` } },
  ],
});

async function answer({ url, key, prompt, image, picture, stream, tools, schema, system, options }, talk) {
  const begin = system ? [{ role: 'system', content: system }] : [];
  const content = image ? [{ type: 'text', text: prompt }, { type: 'image_url', image_url: { url: image } }] : prompt;
  const request = {
    baseURL: url,
    apiKey: key,
    model: MODEL,
    messages: [...begin, ...talk.history, { role: 'user', content }],
    maxSteps: 5,
    ...options,
  };
  if (tools) request.tools = [picture ? pictured : weather];
  if (schema)
    request.responseFormat = {
      type: 'json_schema',
      json_schema: { name: 'person', strict: true, schema: z.toJSONSchema(Person) },
    };
  let pieces = 1;
  let result;
  if (stream) {
    result = streamText(request);
    // Each of these fails with the stream, which is where this script hears of it.
    for (const promise of [result.messages, result.steps, result.usage, result.totalUsage]) promise.catch(() => {});
    const shown = [];
    for await (const event of result.fullStream) {
      if (event.type === 'error') throw new Error(event.error);
      if (event.type === 'text-delta' && event.text) shown.push(event.text);
    }
    pieces = shown.length;
    const messages = await result.messages;
    result = { messages, steps: await result.steps };
    if (shown.join('') !== result.steps.map((step) => step.text).join('')) throw new Error('text was lost');
  } else {
    result = await generateText(request);
  }
  talk.history = result.messages.slice(begin.length);
  const text = result.steps.map((step) => step.text ?? '').join('');
  return {
    text,
    pieces,
    calls: result.steps.flatMap((step) => step.toolCalls).map((call) => [call.toolName, JSON.parse(call.args)]),
    tokens: result.steps.reduce((sum, step) => sum + step.usage.total_tokens, 0),
    value: schema ? JSON.parse(text) : undefined,
  };
}

await serve(answer, (error) => ({ status: error.response?.status, message: String(error.message) }));
