import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { address } from "../api/client";
import type { Match, Session } from "../api/types";
import { auth, may, mayBegin, SEES_RUNS, signOut } from "../state/access";
import { conversations, titleOf } from "../state/conversations";
import type { Family } from "../state/families";
import { attempt } from "../state/faults";
import { formatMoment, type Key, t } from "../state/language";
import { current, startNew } from "../state/open";
import { changeTheme, sidebarOpen, theme } from "../state/preferences";
import { conversationId, link, page } from "../state/route";
import { Button, IconButton } from "../ui/button";
import { Icon, type IconName } from "../ui/icons";
import { Menu } from "../ui/menu";

export const PAGES: { page: string; icon: IconName; label: Key; scope: string }[] = [
  { page: "runs", icon: "clock", label: "page.runs", scope: SEES_RUNS },
  { page: "jobs", icon: "play", label: "page.jobs", scope: "jobs" },
  { page: "skills", icon: "book", label: "page.skills", scope: "sessions:read" },
  { page: "memory", icon: "spark", label: "page.memory", scope: "sessions:read" },
  { page: "usage", icon: "chart", label: "page.usage", scope: "sessions:read" },
  { page: "health", icon: "pulse", label: "page.health", scope: "sessions:read" },
  { page: "mcp", icon: "plug", label: "page.mcp", scope: "admin" },
  { page: "keys", icon: "key", label: "page.keys", scope: "admin" },
  { page: "model", icon: "spark", label: "page.model", scope: "admin" },
  { page: "settings", icon: "gear", label: "page.settings", scope: "sessions:read" },
];

const THEME_ICONS: Record<string, IconName> = { system: "system", light: "sun", dark: "moon" };

export function Sidebar() {
  const narrow = () => matchMedia("(max-width: 800px)").matches;
  const chosen = (event: MouseEvent) => {
    if (narrow() && (event.target as HTMLElement).closest("a")) sidebarOpen.value = false;
  };
  return (
    <aside class="sidebar" aria-label={t("sidebar")} onClick={chosen}>
      <div class="sidebar-head">
        <a class="brand" href={link("c")}>
          Hermes
        </a>
        {mayBegin() && <IconButton icon="plus" label={t("new")} onClick={startNew} />}
      </div>
      <Search />
      <nav class="conversations" aria-label={t("conversations")}>
        {conversations.matches.value ? <Matches matches={conversations.matches.value} /> : <Groups />}
      </nav>
      <Foot />
    </aside>
  );
}

function Search() {
  const timer = useRef(0);
  const find = (value: string) => {
    conversations.search.value = value;
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => void attempt(() => conversations.find(value)), 150);
  };
  return (
    <search class="search">
      <Icon name="search" size={16} />
      <input
        type="search"
        id="search"
        dir="auto"
        aria-label={t("search")}
        placeholder={t("search")}
        value={conversations.search.value}
        onInput={(event) => find(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") find("");
        }}
      />
    </search>
  );
}

function Matches({ matches }: { matches: Match[] }) {
  if (!matches.length) return <p class="faint padded">{t("search.none")}</p>;
  return (
    <ul>
      {matches.map((match) => (
        <li key={`${match.session_id}:${match.message_id}`}>
          <a class="match" href={link("c", match.session_id, ...(match.message_id ? [match.message_id] : []))}>
            <strong dir="auto">{match.title ?? t("list.untitled")}</strong>
            <span dir="auto">
              <Snippet match={match} />
            </span>
            {match.timestamp && <time class="faint">{formatMoment(match.timestamp)}</time>}
          </a>
        </li>
      ))}
    </ul>
  );
}

/** Highlights are counted in code points. */
function Snippet({ match }: { match: Match }) {
  const points = [...match.snippet];
  const parts = [];
  let at = 0;
  for (const [from, to] of match.highlights) {
    parts.push(points.slice(at, from).join(""), <mark key={from}>{points.slice(from, to).join("")}</mark>);
    at = to;
  }
  return (
    <>
      {parts}
      {points.slice(at).join("")}
    </>
  );
}

function Groups() {
  const groups = conversations.groups.value;
  return (
    <>
      {conversations.archived.value && (
        <p class="padded">
          <Button kind="quiet" icon="left" onClick={() => showArchived(false)}>
            {t("list.leave_archive")}
          </Button>
        </p>
      )}
      {conversations.loaded.value && !groups.length && (
        <p class="faint padded">{t(conversations.archived.value ? "list.empty_archive" : "list.empty")}</p>
      )}
      {groups.map((group) => (
        <section key={group.label} aria-label={group.label}>
          <h2>{group.label}</h2>
          <ul>
            {group.families.map((family) => (
              <Entry key={family.session.id} family={family} />
            ))}
          </ul>
        </section>
      ))}
      {conversations.hasMore.value && (
        <p class="padded">
          <Button kind="quiet" onClick={() => void conversations.more()}>
            {t("list.more")}
          </Button>
        </p>
      )}
    </>
  );
}

export function showArchived(archived: boolean): void {
  conversations.archived.value = archived;
  void conversations.refresh();
}

function Entry({ family }: { family: Family }) {
  const { session, members, pinned } = family;
  const renaming = useSignal(false);
  const open = members.some((member) => member.id === conversationId.value);
  const entry = useRef<HTMLLIElement>(null);
  if (renaming.value) {
    const close = () => {
      renaming.value = false;
      // The focus goes back to the entry, unless somebody has put it elsewhere.
      setTimeout(() => {
        if (document.activeElement === document.body) entry.current?.querySelector("a")?.focus();
      });
    };
    return <Rename session={session} onClose={close} />;
  }
  const write = may("sessions:write");
  return (
    <li class={`entry ${open ? "open" : ""}`} ref={entry}>
      <a href={link("c", session.id)} aria-current={open ? "page" : undefined} dir="auto" title={titleOf(session)}>
        {family.working && <span class="live-dot" role="img" aria-label={t("list.working")} />}
        {titleOf(session)}
      </a>
      <Menu
        label={t("list.actions", { title: titleOf(session) })}
        entries={[
          ...(write
            ? [
                {
                  label: t(pinned ? "list.unpin" : "list.pin"),
                  icon: "pin" as const,
                  run: () => void conversations.change(pinned ? members : [session], { pinned: !pinned }),
                },
                { label: t("list.rename"), icon: "pencil" as const, run: () => (renaming.value = true) },
                {
                  label: t(session.archived ? "list.unarchive" : "list.archive"),
                  icon: "archive" as const,
                  run: () => void conversations.archive(session, !session.archived),
                },
              ]
            : []),
          {
            label: t("export"),
            icon: "download",
            run: () =>
              location.assign(address(`api/sessions/${encodeURIComponent(session.id)}/export?format=markdown`)),
          },
          ...(write
            ? [
                {
                  label: t(members.length > 1 ? "list.delete_all" : "list.delete"),
                  icon: "trash" as const,
                  danger: true,
                  run: () => void conversations.delete(session),
                },
              ]
            : []),
        ]}
      />
    </li>
  );
}

function Rename({ session, onClose }: { session: Session; onClose(): void }) {
  const input = useRef<HTMLInputElement>(null);
  useLayoutEffect(() => input.current?.select(), []);
  const save = () => {
    const title = input.current?.value.trim();
    onClose();
    if (!title || title === session.title) return;
    void conversations.change([session], { title }).then(() => current.value?.refreshSession().catch(() => {}));
  };
  return (
    <li class="entry">
      <input
        ref={input}
        type="text"
        dir="auto"
        maxLength={100}
        aria-label={t("list.rename")}
        defaultValue={titleOf(session)}
        onBlur={save}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.isComposing) save();
          if (event.key === "Escape") onClose();
        }}
      />
    </li>
  );
}

function Foot() {
  const offered = PAGES.filter((entry) => may(entry.scope));
  return (
    <div class="sidebar-foot">
      <details class="pages" open={page.value !== "c"}>
        <summary>{t("pages")}</summary>
        <nav aria-label={t("pages")}>
          {offered.map((entry) => (
            <a key={entry.page} href={link(entry.page)} aria-current={page.value === entry.page ? "page" : undefined}>
              <Icon name={entry.icon} size={16} /> {t(entry.label)}
            </a>
          ))}
        </nav>
      </details>
      <div class="foot-row">
        <IconButton
          icon={THEME_ICONS[theme.value] ?? "system"}
          label={t(`theme.${theme.value}` as Key)}
          onClick={changeTheme}
        />
        <IconButton
          icon="archive"
          label={t("list.show_archive")}
          pressed={conversations.archived.value}
          onClick={() => showArchived(!conversations.archived.value)}
        />
        <IconButton icon="question" label={t("keys.title")} onClick={() => dispatchEvent(new Event("hermes:keys"))} />
        <span class="space" />
        {auth.value?.key_required && (
          <>
            <span class="faint">{auth.value.owner}</span>
            <IconButton icon="exit" label={t("signout")} onClick={() => void attempt(() => signOut())} />
          </>
        )}
      </div>
    </div>
  );
}
