import type { Session } from "../api/types";

/** A conversation with all its branches: one entry of the list. */
export interface Family {
  /** The branch that was used last. */
  session: Session;
  /** The branches that are loaded, the last used first. */
  members: Session[];
  pinned: boolean;
  working: boolean;
}

export function familiesOf(sessions: Session[]): Family[] {
  const parents = new Map(sessions.map((session) => [session.id, session.parent_session_id]));
  const root = (id: string): string => {
    const parent = parents.get(id);
    return parent ? root(parent) : id;
  };
  const found = new Map<string, Session[]>();
  for (const session of sessions) {
    const family = root(session.id);
    found.set(family, [...(found.get(family) ?? []), session]);
  }
  return [...found.values()].map((members) => ({
    session: members[0] as Session,
    members,
    pinned: members.some((session) => session.pinned),
    working: members.some((session) => session.active_run_id),
  }));
}
