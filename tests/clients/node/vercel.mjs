// The package `ai` with both of its providers for this kind of server.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, isStepCount, streamText, tool } from 'ai';
import { City, MODEL, Person, WEATHER, serve } from './asked.mjs';

function modelOf({ api, url, key }) {
  const place = { baseURL: url, apiKey: key };
  if (api === 'compatible')
    return createOpenAICompatible({ ...place, name: 'hermes', supportsStructuredOutputs: true, includeUsage: true })(MODEL);
  return createOpenAI(place)[api](MODEL);
}

async function answer(question, talk) {
  const { prompt, stream, tools, schema, chain, system, options } = question;
  const asked = { role: 'user', content: prompt };
  const request = {
    model: modelOf(question),
    messages: chain ? [asked] : [...talk.history, asked],
    stopWhen: isStepCount(5),
    // A refusal would be asked again after seconds, whatever the server says of it.
    maxRetries: 0,
    ...options,
  };
  if (chain && talk.last) request.providerOptions = { openai: { previousResponseId: talk.last } };
  if (tools)
    request.tools = { weather: tool({ description: 'The weather in a city.', inputSchema: City, execute: () => WEATHER }) };
  if (system) request.system = system;
  if (schema) request.output = Output.object({ schema: Person });
  let pieces = 0;
  let text = '';
  let result;
  if (stream) {
    let failure;
    result = streamText({ ...request, onError: ({ error }) => (failure ??= error) });
    for await (const part of result.stream) {
      if (part.type !== 'text-delta') continue;
      pieces += 1;
      text += part.text;
    }
    if (failure) throw failure;
  } else {
    result = await generateText(request);
  }
  const steps = await result.steps;
  const whole = steps.flatMap((step) => step.content).map((part) => (part.type === 'text' ? part.text : '')).join('');
  if (stream && text !== whole) throw new Error('text was lost');
  talk.history = [...request.messages, ...(await result.responseMessages)];
  talk.last = steps.at(-1).providerMetadata?.openai?.responseId;
  const own = steps.flatMap((step) => step.toolCalls).filter((call) => !call.providerExecuted);
  return {
    text: whole,
    pieces: pieces || 1,
    calls: own.map((call) => [call.toolName, call.input]),
    tokens: (await result.usage).totalTokens,
    value: schema ? await result.output : undefined,
  };
}

await serve(answer, (error) => ({ status: error.statusCode, message: String(error.message) }));
