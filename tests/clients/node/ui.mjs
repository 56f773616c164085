// The package `ai` as a web page uses it: a chat of UI messages whose tools run in the page, and the route behind it.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import {
  AbstractChat,
  convertToModelMessages,
  isStepCount,
  lastAssistantMessageIsCompleteWithApprovalResponses,
  lastAssistantMessageIsCompleteWithToolCalls,
  streamText,
  toUIMessageStream,
  tool,
  validateUIMessages,
} from 'ai';
import { City, MODEL, PICTURE, WEATHER, serve } from './asked.mjs';

function modelOf({ api, url, key }) {
  const place = { baseURL: url, apiKey: key };
  if (api === 'compatible') return createOpenAICompatible({ ...place, name: 'hermes', includeUsage: true })(MODEL);
  return createOpenAI(place)[api](MODEL);
}

const described = { description: 'The weather in a city.', inputSchema: City };
// Where a tool runs: in the page, in the route, or in the route once a person has agreed.
const places = {
  page: tool(described),
  route: tool({ ...described, execute: () => WEATHER }),
  asking: tool({ ...described, execute: () => WEATHER, needsApproval: true }),
  picture: tool({
    ...described,
    execute: () => WEATHER,
    toModelOutput: () => ({
      type: 'content',
      value: [
        { type: 'text', text: WEATHER },
        { type: 'file', mediaType: 'image/png', data: { type: 'data', data: PICTURE } },
      ],
    }),
  }),
};

// What a web framework keeps for the chat.
class State {
  status = 'ready';
  error = undefined;
  messages = [];
  pushMessage = (message) => (this.messages = [...this.messages, message]);
  popMessage = () => (this.messages = this.messages.slice(0, -1));
  replaceMessage = (index, message) => (this.messages = this.messages.with(index, message));
  snapshot = (thing) => structuredClone(thing);
}

class Chat extends AbstractChat {
  constructor(question) {
    super({
      state: new State(),
      transport: { sendMessages: ({ messages }) => this.route(messages) },
      sendAutomaticallyWhen: (given) =>
        lastAssistantMessageIsCompleteWithToolCalls(given) || lastAssistantMessageIsCompleteWithApprovalResponses(given),
      onToolCall: ({ toolCall }) => {
        if (this.question.place !== 'page' || toolCall.dynamic) return;
        void this.addToolOutput({ tool: toolCall.toolName, toolCallId: toolCall.toolCallId, output: WEATHER });
      },
    });
    this.question = question;
  }

  // The messages come through a network, and often out of a database.
  async route(messages) {
    const { place, reasoning } = this.question;
    const tools = place ? { weather: places[place] } : {};
    const given = await validateUIMessages({ messages: JSON.parse(JSON.stringify(messages)) });
    const { stream } = streamText({
      model: modelOf(this.question),
      messages: await convertToModelMessages(given, { tools }),
      tools,
      stopWhen: isStepCount(5),
      maxRetries: 0,
      providerOptions: reasoning ? { openai: { forceReasoning: true, reasoningSummary: 'auto', ...reasoning } } : {},
      onError: () => {},
    });
    return toUIMessageStream({ stream, tools, originalMessages: given, onError: (error) => String(error.message) });
  }
}

const settled = async (chat) => {
  while (chat.status === 'submitted' || chat.status === 'streaming') await new Promise((resolve) => setTimeout(resolve, 5));
};

async function answer(question, talk) {
  const chat = (talk.last ??= new Chat(question));
  chat.question = question;
  chat.clearError();
  const { prompt, image, agree, again } = question;
  const files = image ? [{ type: 'file', mediaType: 'image/png', url: image }] : [];
  if (prompt) await chat.sendMessage({ text: prompt, files });
  else await (again ? chat.sendMessage() : chat.regenerate());
  await settled(chat);
  for (const part of chat.lastMessage.parts)
    if (part.state === 'approval-requested') await chat.addToolApprovalResponse({ id: part.approval.id, approved: agree });
  await settled(chat);
  if (chat.error) throw chat.error;
  const { parts } = chat.lastMessage;
  const text = parts.filter((part) => part.type === 'text').map((part) => part.text);
  return {
    text,
    calls: parts.filter((part) => part.type === 'tool-weather').map((part) => [part.input, part.state, part.output ?? null]),
    others: parts.filter((part) => part.type === 'dynamic-tool').map((part) => [part.toolName, part.state]),
    reasoning: parts.filter((part) => part.type === 'reasoning').map((part) => part.text),
    messages: chat.messages.length,
  };
}

await serve(answer, (error) => ({ status: error.statusCode, message: String(error.message) }));
