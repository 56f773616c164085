// The package `@librechat/agents`, through which LibreChat asks its models, set up as for one of its custom endpoints.
import { randomUUID } from 'node:crypto';
import { tool } from '@langchain/core/tools';
import { GraphEvents, Providers, Run, TitleMethod, formatAgentMessages } from '@librechat/agents';
import { City, MODEL, WEATHER, serve } from './asked.mjs';

const weather = tool(() => WEATHER, { name: 'weather', description: 'The weather in a city.', schema: City });

function modelOf({ url, key, api, stream, options }) {
  return {
    provider: Providers.OPENAI,
    model: MODEL,
    apiKey: key,
    user: 'user-1',
    streaming: stream,
    disableStreaming: !stream,
    streamUsage: true,
    useResponsesApi: api === 'responses',
    maxRetries: 0,
    configuration: { baseURL: url },
    ...options,
  };
}

async function answer(question, talk) {
  const { prompt, image, tools, system, title } = question;
  const content = image ? [{ type: 'text', text: prompt }, { type: 'image_url', image_url: { url: image } }] : prompt;
  // What LibreChat keeps of a conversation are the parts that were shown; the messages are made from them each time.
  talk.history.push({ role: 'user', content });
  const shown = [];
  const run = await Run.create({
    runId: randomUUID(),
    graphConfig: {
      type: 'standard',
      llmConfig: modelOf(question),
      tools: tools ? [weather] : [],
      instructions: system || undefined,
    },
    returnContent: true,
    customHandlers: {
      [GraphEvents.ON_MESSAGE_DELTA]: { handle: (_, data) => shown.push(...data.delta.content.map((part) => part.text)) },
    },
  });
  const config = { runId: randomUUID(), streamMode: 'values', version: 'v2', configurable: { thread_id: randomUUID() } };
  const parts = await run.processStream({ messages: formatAgentMessages(talk.history).messages }, config);
  talk.history.push({ role: 'assistant', content: parts });
  const text = parts.map((part) => part.text ?? '').join('');
  const pieces = shown.filter((piece) => piece);
  if (pieces.join('') !== text) throw new Error('text was lost');
  const told = {
    text,
    pieces: pieces.length,
    calls: parts.filter((part) => part.type === 'tool_call').map(({ tool_call: { name, args } }) => [name, args]),
    tokens: run.getRunMessages().reduce((sum, message) => sum + (message.usage_metadata?.total_tokens ?? 0), 0),
  };
  if (title)
    told.title = await run.generateTitle({
      provider: Providers.OPENAI,
      inputText: prompt,
      contentParts: parts,
      titleMethod: TitleMethod.COMPLETION,
      titlePrompt: title,
      clientOptions: modelOf({ ...question, stream: false }),
    });
  return told;
}

await serve(answer, (error) => ({ status: error.status, message: String(error.message) }));
