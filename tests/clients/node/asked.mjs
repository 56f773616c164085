// Questions come as lines of JSON on the standard input, and each is answered by one line of JSON.
import { createInterface } from 'node:readline';
import { z } from 'zod';

export const MODEL = 'hermes-agent';
export const WEATHER = '21 degrees';
// One pixel, as base64.
export const PICTURE =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==';
export const City = z.object({ city: z.string() });
export const Person = z.object({ name: z.string(), born: z.number() });

// What a talk remembers from question to question.
const talks = new Map();

export async function serve(answer, errorOf) {
  for await (const line of createInterface({ input: process.stdin })) {
    const question = JSON.parse(line);
    const begun = talks.get(question.talk) ?? { history: [], last: undefined };
    talks.set(question.talk, begun);
    const told = await answer(question, begun).catch((error) => ({ error: errorOf(error) }));
    console.log(JSON.stringify(told));
  }
}
