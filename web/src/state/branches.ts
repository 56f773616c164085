import type { Branch } from "./conversation";

/** The conversations that go on differently at a message, and which of them is looked at. */
export interface Variants {
  ids: string[];
  at: number;
}

/** By the number of messages before it: where the family of a conversation parts. */
export function variantsOf(id: string, family: Branch[]): Map<number, Variants> {
  const found = new Map<number, Variants>();
  const byId = new Map(family.map((branch) => [branch.id, branch]));
  let own = byId.get(id);
  let limit = Number.POSITIVE_INFINITY;
  while (own) {
    const here: string = own.id;
    const forks = family.filter((branch) => branch.parent_session_id === here && branch.shared_messages < limit);
    for (const place of new Set(forks.map((branch) => branch.shared_messages))) {
      const ids = [here, ...forks.filter((branch) => branch.shared_messages === place).map((branch) => branch.id)];
      found.set(place, { ids, at: 0 });
    }
    const parent = own.parent_session_id ? byId.get(own.parent_session_id) : undefined;
    const place = own.shared_messages;
    if (parent && place < limit) {
      const forks = family.filter(
        (branch) => branch.parent_session_id === parent.id && branch.shared_messages === place,
      );
      const ids = [parent.id, ...forks.map((branch) => branch.id)];
      const before = found.get(place);
      const all = before ? [...ids, ...before.ids.filter((other) => !ids.includes(other))] : ids;
      found.set(place, { ids: all, at: all.indexOf(here) });
    }
    limit = Math.min(limit, place);
    own = parent;
  }
  return found;
}
