/* The bar of a measured cell that runs for long: at the lower edge of the page while its model lives, and in no output. */

const percent = (share) => `${Math.round(1000 * Math.min(Math.max(Number(share) || 0, 0), 1)) / 10}%`;

/** What the bar shows: its words, and how wide the two parts are. */
export function shownOf(facts) {
  return { words: facts?.words ?? "", now: percent(facts?.now), most: percent(facts?.most) };
}

const part = (style, ...children) => {
  const made = document.createElement("div");
  made.style.cssText = style;
  made.append(...children);
  return made;
};

const PLACE = "position:fixed;right:14px;bottom:34px;z-index:1000;width:340px;max-width:calc(100vw - 28px);box-sizing:border-box;"
  + "padding:7px 11px 9px;border-radius:6px;pointer-events:none;font:12px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;"
  + "color:var(--jp-ui-font-color1,var(--vscode-foreground,#222));background:var(--jp-layout-color1,var(--vscode-editor-background,#fff));"
  + "border:1px solid var(--jp-border-color1,#999);box-shadow:0 1px 5px rgba(0,0,0,.25)";
const TRACK = "position:relative;height:6px;margin-top:5px;border-radius:3px;overflow:hidden;background:rgba(128,128,128,.22)";

export default {
  initialize({ model }) {
    const words = part("");
    const most = part("position:absolute;inset:0 auto 0 0;background:#4477aa;opacity:.4");
    const now = part("position:absolute;inset:0 auto 0 0;background:#4477aa");
    const box = part(PLACE, words, part(TRACK, most, now));
    box.className = "gpumem-progress";
    box.setAttribute("role", "status");
    // Every second would be too often for a reader who listens.
    box.setAttribute("aria-live", "off");
    const draw = () => {
      const shown = shownOf(model.get("facts"));
      words.textContent = shown.words;
      now.style.width = shown.now;
      most.style.width = shown.most;
      if (shown.words && !box.isConnected && !model.get("over")) document.body.append(box);
    };
    const end = () => { if (model.get("over")) leave(); };
    const leave = () => {
      box.remove();
      model.off("change:facts", draw);
      model.off("change:over", end);
    };
    model.on("change:facts", draw);
    model.on("change:over", end);
    draw();
    return leave;
  },
};
