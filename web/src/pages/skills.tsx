import { useSignal } from "@preact/signals";
import { patch, post, remove } from "../api/client";
import { may } from "../state/access";
import { attempt } from "../state/faults";
import { t } from "../state/language";
import { go, link, route } from "../state/route";
import { toast } from "../state/toasts";
import { Button } from "../ui/button";
import { confirmed } from "../ui/confirm";
import { Icon } from "../ui/icons";
import { Load, useLoad } from "../ui/load";

interface SkillRow {
  name: string;
  description: string;
  category: string | null;
}

interface Skill extends SkillRow {
  content: string;
  files: string[];
  editable: boolean;
}

export default function Skills() {
  const name = route.value[1];
  if (name === "+") return <NewSkill />;
  return name ? <OneSkill key={name} name={name} /> : <SkillList />;
}

function SkillList() {
  const skills = useLoad<{ data: SkillRow[] }>("v1/skills");
  return (
    <>
      <p class="page-note">{t("skills.text")}</p>
      {may("sessions:write") && (
        <a class="button primary" href={link("skills", "+")}>
          <Icon name="plus" size={16} /> {t("skills.new")}
        </a>
      )}
      <Load from={skills}>
        {(list) =>
          list.data.length ? (
            <ul class="cards">
              {list.data.map((skill) => (
                <li key={skill.name}>
                  <a href={link("skills", skill.name)}>{skill.name}</a>
                  {skill.category && <span class="badge">{skill.category}</span>}
                  <p dir="auto">{skill.description}</p>
                </li>
              ))}
            </ul>
          ) : (
            <p class="faint">{t("skills.none")}</p>
          )
        }
      </Load>
    </>
  );
}

function OneSkill({ name }: { name: string }) {
  const path = `v1/skills/${encodeURIComponent(name)}`;
  const skill = useLoad<Skill>(path);
  const text = useSignal<string | null>(null);
  const save = () =>
    attempt(async () => {
      await patch(path, { content: text.value });
      toast(t("saved"));
    });
  const drop = async () => {
    if (!(await confirmed(t("skills.delete", { name }), t("skills.delete_text"), t("delete")))) return;
    if (await attempt(() => remove(path))) go("skills");
  };
  return (
    <Load from={skill}>
      {(found) => (
        <div class="form">
          <p class="crumbs">
            <a href={link("skills")}>{t("page.skills")}</a> <Icon name="chevron" size={14} /> {found.name}
          </p>
          <label class="field">
            <span>{t("skills.content")}</span>
            <textarea
              class="editor-area"
              dir="auto"
              spellcheck={false}
              readOnly={!found.editable || !may("sessions:write")}
              value={text.value ?? found.content}
              onInput={(event) => (text.value = event.currentTarget.value)}
            />
          </label>
          {found.editable && may("sessions:write") ? (
            <div class="buttons">
              <Button kind="primary" disabled={text.value === null} onClick={() => void save()}>
                {t("save")}
              </Button>
              <Button kind="danger" onClick={() => void drop()}>
                {t("delete")}
              </Button>
            </div>
          ) : (
            <p class="faint">{t("skills.read_only")}</p>
          )}
        </div>
      )}
    </Load>
  );
}

const TEMPLATE = "---\nname: my-skill\ndescription: When to use it, in a sentence.\n---\n\n# Steps\n\n1. …\n";

function NewSkill() {
  const name = useSignal("");
  const content = useSignal(TEMPLATE);
  const save = (event: SubmitEvent) => {
    event.preventDefault();
    void attempt(() => post("v1/skills", { name: name.value.trim(), content: content.value })).then(
      (done) => done && go("skills", name.value.trim()),
    );
  };
  return (
    <form class="form" onSubmit={save}>
      <label class="field">
        <span>{t("jobs.name")}</span>
        <input
          type="text"
          required
          value={name.value}
          onInput={(event) => {
            name.value = event.currentTarget.value;
            content.value = content.value.replace(/^name: .*$/m, `name: ${name.value.trim()}`);
          }}
        />
      </label>
      <label class="field">
        <span>{t("skills.content")}</span>
        <textarea
          class="editor-area"
          value={content.value}
          onInput={(event) => (content.value = event.currentTarget.value)}
        />
      </label>
      <div class="buttons">
        <Button kind="primary" type="submit">
          {t("save")}
        </Button>
        <a class="button plain" href={link("skills")}>
          {t("cancel")}
        </a>
      </div>
    </form>
  );
}
