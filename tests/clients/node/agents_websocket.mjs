// The package `@openai/agents` with its model that speaks over a WebSocket.
import { Agent, OpenAIResponsesWSModel, Runner, tool } from '@openai/agents';
import OpenAI from 'openai';
import { City, MODEL, Person, WEATHER, serve } from './asked.mjs';

const weather = tool({ name: 'weather', description: 'The weather in a city.', parameters: City, execute: () => WEATHER });

async function answer({ url, key, prompt, stream, tools, schema, chain, system, options }, talk) {
  const model = new OpenAIResponsesWSModel(new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 }), MODEL);
  const agent = new Agent({
    name: 'tester',
    instructions: system || undefined,
    model,
    tools: tools ? [weather] : [],
    outputType: schema ? Person : 'text',
    modelSettings: options,
  });
  const asked = { role: 'user', content: prompt };
  const input = chain ? [asked] : [...talk.history, asked];
  const runner = new Runner({ tracingDisabled: true });
  const settings = { stream, previousResponseId: chain ? talk.last : undefined };
  try {
    const result = await runner.run(agent, input, settings);
    const pieces = [];
    if (stream) {
      for await (const event of result) {
        if (event.type === 'raw_model_stream_event' && event.data.type === 'output_text_delta') pieces.push(event.data.delta);
      }
      await result.completed;
      if (result.error) throw result.error;
    }
    const messages = result.newItems.filter((item) => item.type === 'message_output_item');
    const text = messages.map((item) => item.content).join('');
    if (stream && pieces.join('') !== text) throw new Error('text was lost');
    talk.history = result.history;
    talk.last = result.lastResponseId;
    const calls = result.newItems.map((item) => item.rawItem).filter((item) => item?.type === 'function_call');
    return {
      text,
      pieces: pieces.length || 1,
      calls: calls.map((call) => [call.name, JSON.parse(call.arguments)]),
      tokens: result.rawResponses.reduce((sum, response) => sum + response.usage.totalTokens, 0),
      value: schema ? result.finalOutput : undefined,
    };
  } finally {
    await model.close();
  }
}

await serve(answer, (error) => ({ status: error.status, message: String(error.message) }));
