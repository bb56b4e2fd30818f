// A source that asks the server of `eformer serve`: see base.js for what it answers. Comes last, and starts the page.
"use strict";
(() => {
  const POLL = 2000, POLL_WHILE_READING = 400;
  const never = new Promise(() => {});

  const notice = eformer.h("p.failed", { role: "alert", hidden: true });
  document.body.prepend(notice);
  const complain = (text) => {
    notice.textContent = eformer.visible(text);
    notice.hidden = false;
    document.getElementById("app").removeAttribute("aria-busy");
  };

  // Ask for facts. An answer that says why there are none is shown, and whoever waits for them waits for ever.
  const ask = async (name, parameters = {}, options = {}) => {
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined));
    try {
      const answer = await fetch(`${name}.json?${query}`, { cache: "no-cache", ...options });
      const found = await answer.json();
      if (answer.ok) { notice.hidden = true; return found; }
      complain(found.error);
    } catch (error) {
      if (error.name !== "AbortError") complain("The server does not answer. Is `eformer serve` still running?");
    }
    return never;
  };

  const checkpointSource = () => {
    let reading = new AbortController();
    return {
      kind: "checkpoint",
      summary: () => ask("summary"),
      children: (path, options = {}) => ask("children", { path, ...options }),
      search: (query, options = {}) => ask("search", { query, ...options }),
      treemap: (path) => ask("treemap", { path }),
      locate: (path, kind, options = {}) => ask("locate", { path, kind, ...options }),
      changes: async () => null,
      // Whoever selects another leaf does not wait for this one any more: the server stops reading it.
      leaf: (path) => {
        reading.abort();
        reading = new AbortController();
        return ask("leaf", { path }, { signal: reading.signal });
      },
    };
  };

  const runSource = () => ({
    kind: "run",
    isLive: true,
    run: () => ask("run"),
    href: (number) => `step/${number}/`,
    // Call `changed` with the run whenever it is another than before.
    follow(changed) {
      let known = "";
      const look = async () => {
        let wait = POLL;
        try {
          const answer = await fetch("run.json", { cache: "no-store", headers: known ? { "If-None-Match": known } : {} });
          if (answer.ok) {
            const run = await answer.json();
            known = answer.headers.get("ETag");
            if (run.steps.some((step) => !step.is_read)) wait = POLL_WHILE_READING;
            await changed(run);
          }
          notice.hidden = true;
        } catch { complain("The server does not answer. Is `eformer serve` still running?"); }
        setTimeout(look, document.hidden ? 5 * POLL : wait);
      };
      look();
    },
  });

  eformer.start(document.documentElement.dataset.kind === "run" ? runSource() : checkpointSource());
})();
