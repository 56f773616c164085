import { useSignal } from "@preact/signals";
import { post, remove } from "../api/client";
import type { Job, List, Run } from "../api/types";
import { attempt, describe } from "../state/faults";
import { formatMoment, t } from "../state/language";
import { link } from "../state/route";
import { Button } from "../ui/button";
import { confirmed } from "../ui/confirm";
import { Dialog } from "../ui/dialog";
import { Load, useLoad } from "../ui/load";
import { Menu } from "../ui/menu";
import { StatusBadge } from "../ui/status_badge";
import { Table } from "../ui/table";

const moment = (value: number | string | null): string => {
  if (value === null) return "–";
  return formatMoment(typeof value === "number" ? value : Date.parse(value) / 1000);
};

/** Why the latest result is not where it was to go. */
const deliveryFault = (job: Job): string | null => {
  const latest = job.deliveries[0];
  return latest && latest.status !== "delivered" ? latest.error : null;
};

export default function Jobs() {
  const jobs = useLoad<List<Job>>("api/jobs?include_disabled=true", 3);
  const making = useSignal(false);
  const history = useSignal<Job | null>(null);
  const act = (action: () => Promise<unknown>) => void attempt(action).then(jobs.reload);
  const drop = async (job: Job) => {
    const sure = await confirmed(t("jobs.delete", { name: job.name }), t("jobs.delete_text"), t("delete"));
    if (sure) act(() => remove(path(job)));
  };
  const path = (job: Job) => `api/jobs/${encodeURIComponent(job.id)}`;
  return (
    <>
      <p class="page-note">{t("jobs.text")}</p>
      {!jobs.fault.value && (
        <Button kind="primary" icon="plus" onClick={() => (making.value = true)}>
          {t("jobs.new")}
        </Button>
      )}
      <Load from={jobs}>
        {(list) =>
          list.data.length ? (
            <Table
              label={t("page.jobs")}
              columns={[
                t("jobs.name"),
                t("jobs.schedule"),
                t("jobs.next"),
                t("jobs.last"),
                t("runs.status"),
                t("actions"),
              ]}
            >
              {list.data.map((job) => (
                <tr key={job.id}>
                  <td class="wide">
                    <strong dir="auto">{job.name}</strong>
                    <div class="faint clip" dir="auto">
                      {job.prompt}
                    </div>
                    {job.last_error && <div class="field-fault">{job.last_error}</div>}
                    {deliveryFault(job) && (
                      <div class="field-fault">{t("jobs.not_delivered", { reason: deliveryFault(job) ?? "" })}</div>
                    )}
                  </td>
                  <td>{job.schedule_display}</td>
                  <td>
                    {job.enabled
                      ? moment(job.next_run_at)
                      : job.state === "completed"
                        ? t("jobs.completed")
                        : t("jobs.paused")}
                  </td>
                  <td>{moment(job.last_run_at)}</td>
                  <td>{job.last_status && <StatusBadge status={job.last_status} />}</td>
                  <td>
                    <Menu
                      label={t("list.actions", { title: job.name })}
                      entries={[
                        { label: t("jobs.run"), icon: "play", run: () => act(() => post(`${path(job)}/run`)) },
                        job.enabled
                          ? { label: t("jobs.pause"), icon: "pause", run: () => act(() => post(`${path(job)}/pause`)) }
                          : {
                              label: t("jobs.resume"),
                              icon: "play",
                              run: () => act(() => post(`${path(job)}/resume`)),
                            },
                        { label: t("jobs.history"), icon: "clock", run: () => (history.value = job) },
                        { label: t("delete"), icon: "trash", danger: true, run: () => void drop(job) },
                      ]}
                    />
                  </td>
                </tr>
              ))}
            </Table>
          ) : (
            <p class="faint">{t("jobs.none")}</p>
          )
        }
      </Load>
      {making.value && <NewJob onClose={() => (making.value = false)} onMade={() => void jobs.reload()} />}
      {history.value && <History job={history.value} onClose={() => (history.value = null)} />}
    </>
  );
}

function NewJob({ onClose, onMade }: { onClose(): void; onMade(): void }) {
  const fault = useSignal("");
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const fields = Object.fromEntries(new FormData(event.currentTarget as HTMLFormElement));
    try {
      await post("api/jobs", fields);
      onMade();
      onClose();
    } catch (error) {
      fault.value = describe(error);
    }
  };
  return (
    <Dialog title={t("jobs.new")} onClose={onClose}>
      <form class="form" onSubmit={submit}>
        <label class="field">
          <span>{t("jobs.name")}</span>
          <input name="name" type="text" required maxLength={200} dir="auto" />
        </label>
        <label class="field">
          <span>{t("jobs.schedule")}</span>
          <input name="schedule" type="text" required placeholder="every 2h · 0 9 * * 1-5 · 30m" dir="ltr" />
        </label>
        <label class="field">
          <span>{t("jobs.prompt")}</span>
          <textarea name="prompt" required rows={4} dir="auto" />
        </label>
        <p class="field-fault" role="alert">
          {fault.value}
        </p>
        <div class="buttons">
          <Button kind="primary" type="submit">
            {t("save")}
          </Button>
          <Button onClick={onClose}>{t("cancel")}</Button>
        </div>
      </form>
    </Dialog>
  );
}

function History({ job, onClose }: { job: Job; onClose(): void }) {
  const runs = useLoad<List<Run>>(`api/jobs/${encodeURIComponent(job.id)}/runs?limit=20`);
  return (
    <Dialog title={t("jobs.history_of", { name: job.name })} onClose={onClose}>
      <Load from={runs}>
        {(list) =>
          list.data.length ? (
            <ul class="plain-list">
              {list.data.map((run) => (
                <li key={run.run_id}>
                  <a href={link("runs", run.run_id)} onClick={onClose}>
                    {formatMoment(run.created_at)}
                  </a>{" "}
                  <StatusBadge status={run.status} />
                </li>
              ))}
            </ul>
          ) : (
            <p class="faint">{t("runs.none")}</p>
          )
        }
      </Load>
    </Dialog>
  );
}
