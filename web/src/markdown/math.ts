/** Put formulas in place of their source; the library comes with the first of them. */
export async function renderMath(root: HTMLElement): Promise<void> {
  const found = [...root.querySelectorAll<HTMLElement>("[data-tex]")].filter((element) => !element.dataset.shown);
  if (!found.length) return;
  for (const element of found) element.dataset.shown = "1";
  const [{ default: temml }] = await Promise.all([import("temml"), import("temml/dist/Temml-Local.css")]);
  for (const element of found) {
    const source = element.dataset.tex ?? "";
    try {
      temml.render(source, element, {
        displayMode: element.dataset.display === "1",
        throwOnError: true,
        trust: false,
        maxExpand: 500,
      });
    } catch {
      element.textContent = source;
    }
  }
}
